"""The guest's kernel and its initial root.

The kernel is a stock kernel of the distribution, with the module of soft-RoCE (rdma_rxe). apt
fetches the package and checks its signature. The package is unpacked into a folder of the project's
cache, and not installed. The folder's name has the version and hash. It stays there, so later runs
need no network.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.children import captured

METAPACKAGES = ("linux-image-amd64", "linux-image-generic")
"""Debian's and Ubuntu's names for their newest stock kernel; cloud flavours lack rdma_rxe."""

FETCH_S = 240.0
KERNEL_VARIABLE = "MEGATRON_BYTEPS_VM_KERNEL"


class VmError(Exception):
    """Raised if a virtual machine cannot run. The text says why, and how to fix it."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    folder: Path
    """The package's contents: boot/vmlinuz-RELEASE and lib/modules/RELEASE."""
    release: str

    @property
    def image(self) -> Path:
        return self.folder / "boot" / f"vmlinuz-{self.release}"


def cache_root() -> Path:
    """Get the folder for downloads, the same as in scripts/setup.sh."""
    given = os.environ.get("MEGATRON_BYTEPS_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megatron-byteps"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock, for a single process at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def find_kernel() -> Kernel:
    """Find the kernel that MEGATRON_BYTEPS_VM_KERNEL names, the distribution's newest, or a cached
    one.

    Raises VmError when there is none and none can be fetched.
    """
    given = os.environ.get(KERNEL_VARIABLE)
    if given:
        return _open(Path(given))
    store = cache_root() / "vm"
    with locked(store / ".lock"):
        try:
            packages = _wanted_packages()
            folder = store / _name_of(packages)
            if not folder.exists():
                _fetch(packages, folder)
            return _open(folder)
        except VmError as error:
            # Without a network, the last kernel that worked is used.
            stored = sorted(store.glob("linux-*"), key=lambda path: path.stat().st_mtime)
            if not stored:
                raise
            print(f"note: the guest runs {stored[-1].name}, kept from before: {error}")
            return _open(stored[-1])


def _open(folder: Path) -> Kernel:
    for modules in sorted((folder / "lib" / "modules").glob("*")):
        kernel = Kernel(folder=folder, release=modules.name)
        if kernel.image.is_file() and any(modules.rglob("rdma_rxe.ko*")):
            return kernel
    raise VmError(f"{folder} holds no boot/vmlinuz-* with its lib/modules/*/**/rdma_rxe.ko")


def _apt(*command: str, cwd: Path | None = None) -> str:
    if shutil.which(command[0]) is None:
        raise VmError(
            f"{command[0]} is not there: the guest's kernel comes from Debian or Ubuntu; elsewhere "
            f"unpack a kernel with rdma_rxe and name its folder in {KERNEL_VARIABLE}"
        )
    try:
        ended = captured(command, FETCH_S, env={**os.environ, "LC_ALL": "C"}, cwd=cwd)
    except subprocess.TimeoutExpired:
        raise VmError(f"'{' '.join(command)}' did not end within {FETCH_S:g} s") from None
    if ended.returncode != 0:
        last = (ended.stderr or ended.stdout).strip().splitlines()[-1:]
        raise VmError(f"'{' '.join(command)}' failed: {''.join(last)}")
    return ended.stdout


def _depends(package: str) -> list[str]:
    text = _apt("apt-cache", "depends", "--no-recommends", "--no-suggests", package)
    names = re.findall(r"^\s+(?:Pre)?Depends: (\S+)", text, re.MULTILINE)
    return [name for name in names if re.match(r"linux-(image|modules|modules-extra)-\d", name)]


def _wanted_packages() -> list[str]:
    for metapackage in METAPACKAGES:
        try:
            images = _depends(metapackage)
        except VmError:
            continue
        if images:
            more = [name for image in images for name in _depends(image)]
            return sorted({*images, *more})
    raise VmError(
        f"apt knows none of {', '.join(METAPACKAGES)}: run 'apt-get update' with a network, or "
        f"unpack a kernel with rdma_rxe and name its folder in {KERNEL_VARIABLE}"
    )


def _name_of(packages: list[str]) -> str:
    shown = _apt("apt-cache", "show", "--no-all-versions", packages[0])
    version = re.search(r"^Version: (\S+)", shown, re.MULTILINE)
    sha256 = re.search(r"^SHA256: (\S+)", shown, re.MULTILINE)
    if version is None or sha256 is None:
        raise VmError(f"'apt-cache show {packages[0]}' names no version or no hash")
    return f"{packages[0]}_{version[1].replace(':', '%')}_{sha256[1][:16]}"


def _fetch(packages: list[str], folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as made:
        scratch = Path(made)
        try:
            _apt("apt-get", "-q", "download", *packages, cwd=scratch)
        except VmError:
            # A mirror drops a version as soon as there is a newer one, and our package lists may be
            # old.
            if os.geteuid() == 0:
                _apt("apt-get", "-q", "update")
            _apt("apt-get", "-q", "download", *packages, cwd=scratch)
        for archive in scratch.glob("*.deb"):
            _apt("dpkg", "-x", str(archive), str(scratch / "unpacked"))
        # depmod and modprobe look in /lib, but newer Debian packages have only usr/lib.
        if not (scratch / "unpacked" / "lib").exists():
            (scratch / "unpacked" / "lib").symlink_to("usr/lib")
        _open(scratch / "unpacked")
        (scratch / "unpacked").rename(folder)


# ----- the initial root: busybox, its modules and init.sh; stored next to the kernel


INIT = Path(__file__).parent / "init.sh"
BUSYBOX = Path("/bin/busybox")
EARLY = ("virtio_pci", "virtio_rng", "9pnet_virtio", "9p", "overlay")
"""Modules that init.sh loads before the root changes."""
# crc32_*: rxe looks up its checksum by name at run time, so its dependencies do not list these
# modules.
LATE = (
    *("crc32_generic", "crc32_pclmul", "ib_umad", "ib_uverbs", "rdma_ucm", "rdma_rxe"),
    *("veth", "virtio_net", "sch_tbf"),
)


def find_initrd(kernel: Kernel) -> Path:
    """Find the initrd. It is made on first use, and again after its inputs change. Raises
    VmError."""
    for needed in ("cpio", "modprobe", "depmod"):
        if _tool(needed) is None:
            raise VmError(f"{needed} is not there: run 'make setup' (Debian: cpio, kmod)")
    if not BUSYBOX.exists():
        raise VmError(f"{BUSYBOX} is not there: run 'make setup' (Debian: busybox-static)")
    key = hashlib.sha256()
    for part in (INIT.read_bytes(), BUSYBOX.read_bytes(), repr((EARLY, LATE)).encode()):
        key.update(hashlib.sha256(part).digest())
    key.update(str(kernel.image.resolve()).encode())
    store = cache_root() / "vm"
    wanted = store / f"initrd-{kernel.release}-{key.hexdigest()[:16]}.gz"
    with locked(store / ".initrd.lock"):
        if not wanted.exists():
            _build(kernel, wanted)
    return wanted


def _tool(name: str) -> str | None:
    # sbin is not on every user's PATH.
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _run(*command: str | Path) -> str:
    program = _tool(str(command[0])) or str(command[0])
    ended = captured([program, *map(str, command[1:])], 120)
    if ended.returncode != 0:
        raise VmError(f"'{' '.join(map(str, command))}' failed: {ended.stderr.strip()}")
    return ended.stdout


def _module_files(kernel: Kernel) -> list[Path]:
    """Get the files of EARLY, LATE and their dependencies; built-in modules have none."""
    _run("depmod", "-b", kernel.folder, kernel.release)
    files: dict[Path, None] = {}
    for module in (*EARLY, *LATE):
        dry = ("modprobe", "-d", kernel.folder, "-S", kernel.release, "--show-depends", module)
        for line in _run(*dry).splitlines():
            action, _, file = line.partition(" ")
            if action == "insmod":
                files[Path(file.split()[0])] = None
    return list(files)


def _copy_plain(source: Path, target: Path) -> None:
    """Copy a module uncompressed: busybox loads only plain modules."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix == ".xz":
        target.with_suffix("").write_bytes(lzma.decompress(source.read_bytes()))
    elif source.suffix == ".gz":
        target.with_suffix("").write_bytes(gzip.decompress(source.read_bytes()))
    elif source.suffix == ".zst":
        _run("zstd", "-q", "-d", source, "-o", target.with_suffix(""))
    else:
        shutil.copy(source, target)


def _build(kernel: Kernel, wanted: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        for folder in ("bin", "dev", "proc", "sys", "ro", "rw", "new"):
            (root / folder).mkdir()
        shutil.copy(BUSYBOX, root / "bin/busybox")
        shutil.copy(INIT, root / "init")
        (root / "init").chmod(0o755)
        (root / "modules").write_text("\n".join(LATE) + "\n")
        modules = (kernel.folder / "lib/modules" / kernel.release).resolve()
        for source in _module_files(kernel):
            inside = source.resolve().relative_to(modules)
            _copy_plain(source, root / "lib/modules" / kernel.release / inside)
        _run("depmod", "-b", root, kernel.release)
        names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
        packed = subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet"],
            cwd=root,
            input=names.encode(),
            stdout=subprocess.PIPE,
            timeout=120,
            check=True,
        ).stdout
    part = wanted.with_suffix(".part")
    part.write_bytes(gzip.compress(packed, 1))
    part.rename(wanted)
