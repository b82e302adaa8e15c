"""The guest's first root: busybox, the modules it needs, and init.sh. Kept next to the kernel."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import shutil
import subprocess
import tempfile
from pathlib import Path

from .kernel import Kernel, VmError, cache_root, locked

INIT = Path(__file__).parent / "init.sh"
BUSYBOX = Path("/bin/busybox")
EARLY = ("virtio_pci", "virtio_rng", "9pnet_virtio", "9p", "overlay")
"""Loaded by init.sh before the root changes."""
# crc32_*: rxe looks its checksum up by name at run time, so that no dependency shows it.
LATE = (
    *("crc32_generic", "crc32_pclmul", "ib_umad", "ib_uverbs", "rdma_ucm", "rdma_rxe"),
    *("veth", "virtio_net", "sch_tbf"),
)


def find_initrd(kernel: Kernel) -> Path:
    """Made on first use, and anew when what goes into it changes. Raises VmError."""
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
    ended = subprocess.run(
        [program, *map(str, command[1:])],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if ended.returncode != 0:
        raise VmError(f"'{' '.join(map(str, command))}' failed: {ended.stderr.strip()}")
    return ended.stdout


def _module_files(kernel: Kernel) -> list[Path]:
    """Those of EARLY and LATE and all they depend on; what is built in has none."""
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
    """busybox loads plain modules only."""
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
