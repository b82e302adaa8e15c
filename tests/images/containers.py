"""Images and containers without a Docker engine: buildah builds them, podman runs compose files.

buildah builds in a chroot, on bases made from Debian packages; arm64 runs on an emulated CPU.
podman's containers get their own namespaces, including the network, so that nothing is left after
the test.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from scripts import progress

ROOT = Path(__file__).resolve().parents[2]

screen: TextIO | None = None
"""Stream for progress messages: pytest captures stderr while a test runs."""
CACHE = Path(
    os.environ.get("MEGATRON_BYTEPS_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "megatron-byteps")
)
VERSIONS = dict(
    line.split("=", 1)
    for line in (ROOT / "docker/versions.env").read_text().splitlines()
    if line[:1].isupper()
)
TAG = VERSIONS["IMAGE_TAG"]

_BINFMT = Path("/proc/sys/fs/binfmt_misc")
_EMULATOR = Path("/usr/lib/binfmt.d/qemu-aarch64.conf")
_HYBRID = Path("/sys/fs/cgroup/unified")


def run(*command: str | Path, timeout_s: float = 3000, env: Mapping[str, str] | None = None) -> str:
    """Run a command and get its output; the assertion of its success shows all of it."""
    words = [Path(command[0]).name, *map(str, command[1:])]
    with tempfile.TemporaryDirectory() as folder, Path(folder, "out").open("w+b") as out:
        log = Path(folder, "errors")
        full = {**os.environ, **(env or {})}
        status = progress.run(
            " ".join(words)[:40], command, log,
            stdout=out, env=full, timeout_s=timeout_s, stream=screen,
        )  # fmt: skip
        out.seek(0)
        printed = out.read().decode(errors="replace")
        said = f"{printed}\n{log.read_text(errors='replace')}"
    assert status == 0, f"{' '.join(map(str, command))}\n{said[-6000:]}"
    return printed


def let_arm64_run() -> None:
    """Make the kernel run arm64 programs under qemu from now on, in containers too."""
    if not (_BINFMT / "register").exists():
        run("mount", "-t", "binfmt_misc", "binfmt_misc", _BINFMT)
    if not (_BINFMT / "qemu-aarch64").exists():
        # The bytes contain escapes, which the kernel decodes itself.
        (_BINFMT / "register").write_text(_EMULATOR.read_text().strip())


@dataclass(frozen=True, kw_only=True)
class Buildah:
    """Images, in storage that survives the tests: steps that are already built are not repeated."""

    folder: Path
    """Folder for settings and temporary files."""

    @property
    def env(self) -> dict[str, str]:
        # Downloads of a build's steps; buildah assumes that uv's folder exists.
        downloads = self.folder / "buildah-cache"
        if not downloads.exists():
            downloads.mkdir()
            (CACHE / "uv").mkdir(parents=True, exist_ok=True)
            (downloads / "uv").symlink_to(CACHE / "uv")
        return {
            "BUILDAH_ISOLATION": "chroot",
            "BUILDAH_LAYERS": "true",
            "CONTAINERS_STORAGE_CONF": str(self.storage_conf()),
            "TMPDIR": str(self.folder),
        }

    def storage_conf(self) -> Path:
        config = self.folder / "storage.conf"
        config.write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{CACHE}/images/storage"\n'
            f'runroot = "{self.folder}/run"\n'
        )
        return config

    def __call__(self, *arguments: str | Path) -> str:
        return run("buildah", *arguments, env=self.env)

    def base(self, suite: str, arch: str, *packages: str) -> str:
        """Get the name of an image of a small Debian with these packages."""
        script = ROOT / "tests/images/bases.sh"
        return run(script, suite, arch, CACHE / "images", *packages, env=self.env).strip()

    def image(self, *arguments: str, **env: str) -> None:
        run(ROOT / "scripts/images.sh", *arguments, env={**self.env, **env})

    @contextmanager
    def container(self, image: str, arch: str) -> Iterator[str]:
        name = self("from", "--pull-never", "--arch", arch, image).strip()
        try:
            yield name
        finally:
            self("rm", name)

    def size(self, image: str) -> int:
        """Get the bytes of the image's files, uncompressed."""
        listed: list[dict[str, Any]] = json.loads(self("images", "--json", image))
        number, unit = listed[0]["size"].split()
        return int(float(number) * {"KB": 1e3, "MB": 1e6, "GB": 1e9}[unit])


class Podman:
    """podman in its own namespaces: mounts, network and processes, which end with it."""

    def __init__(self, folder: Path, storage_conf: Path) -> None:
        self.folder = folder
        config = folder / "containers.conf"
        # The containers have no control groups, because those need rights to /sys/fs/cgroup. So
        # their only limits are those of this process.
        config.write_text(f"""
[containers]
cgroups = "disabled"
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
static_dir = "{folder}/static"
tmp_dir = "{folder}/tmp"
volume_path = "{folder}/volumes"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
""")
        self.env = {"CONTAINERS_CONF": str(config), "CONTAINERS_STORAGE_CONF": str(storage_conf)}
        # crun supports either version of control groups, not both at once.
        ready = folder / "ready"
        prepare = f"ip link set lo up; ! mountpoint -q {_HYBRID} || umount {_HYBRID}; : >{ready};"
        self._init = subprocess.Popen(
            ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child",
             "sh", "-c", f"{prepare} sleep infinity & wait"],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert self._init.poll() is None, "unshare failed"
            assert time.monotonic() < deadline, "no namespaces after 60 s"
            time.sleep(0.05)

    @property
    def full_env(self) -> dict[str, str]:
        return {**os.environ, **self.env}

    def command(self, *arguments: str | Path) -> list[str]:
        """Make the command line that runs another command inside."""
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children")
        first = children.read_text().split()[0]
        enter = ["nsenter", "--target", first, "--mount", "--net", "--pid"]
        return [*enter, *map(str, arguments)]

    def run(self, *command: str | Path) -> str:
        return run(*self.command(*command), timeout_s=1500, env=self.env)

    def __call__(self, *arguments: str | Path) -> str:
        return self.run("podman", *arguments)

    def close(self) -> None:
        self._init.kill()
        self._init.wait()


# Requirements of an executable or library on its machine.


OLDEST_GLIBC = (2, 34)
"""Version in the wheels' tag, manylinux_2_34, which Debian 12, Ubuntu 22.04 and RHEL 9 satisfy."""
EVERYWHERE = {"libc.so.6", "libm.so.6", "libgcc_s.so.1"}
"""Libraries that every machine with that C library has."""
MACHINES = {62: "x86_64", 183: "aarch64"}


@dataclass(frozen=True, kw_only=True)
class Needs:
    machine: str
    libraries: set[str]
    glibc: tuple[int, ...]
    """Newest version that a symbol requires."""

    def demand_portable(self) -> None:
        loaders = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
        assert self.libraries <= EVERYWHERE | loaders
        assert self.glibc <= OLDEST_GLIBC


def needs(file: Path) -> Needs:
    header = file.read_bytes()[:20]
    assert header[:4] == b"\x7fELF", file
    # Wide output: a truncated version would look like an older version.
    said = subprocess.run(
        ["readelf", "--wide", "--dynamic", "--version-info", file],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    versions = [tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_(\d+(?:\.\d+)+)", said)]
    return Needs(
        machine=MACHINES[int.from_bytes(header[18:20], "little")],
        libraries=set(re.findall(r"\(NEEDED\).*\[(.*)\]", said)),
        glibc=max(versions),
    )
