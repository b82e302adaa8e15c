"""Fixtures that are built once for all image tests: bases, images, wheels."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.images import containers
from tests.images.containers import CACHE, ROOT, TAG, Buildah, Podman, let_arm64_run, run

SUITE = "trixie"
"""Debian release of workers; its Python is 3.13."""


def pytest_configure() -> None:
    # The build runs here, before pytest captures stderr.
    containers.screen = os.fdopen(os.dup(2), "w")


@pytest.fixture(scope="session")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """Runs buildah in a single session at a time, because all sessions use the same image names."""
    (CACHE / "images").mkdir(parents=True, exist_ok=True)
    with (CACHE / "images/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = Buildah(folder=tmp_path_factory.mktemp("buildah"))
        # Remove containers of a stopped run.
        made("rm", "--all")
        yield made
        # Remove images that earlier versions left and that no current image uses. An image with a
        # container of a stopped run stays.
        subprocess.run(
            ["buildah", "rmi", "--prune"], env={**os.environ, **made.env}, capture_output=True
        )


@pytest.fixture(scope="session")
def emulator() -> None:
    let_arm64_run()


@pytest.fixture(scope="session")
def server_image(buildah: Buildah, emulator: None) -> Callable[[str], str]:
    """Builds the server's image for a platform with scripts/images.sh, and returns its name."""
    made: dict[str, str] = {}

    def build(platform: str) -> str:
        if platform not in made:
            arch = platform.removeprefix("linux/")
            bases = {
                "DEBIAN_IMAGE": buildah.base("bookworm", arch),
                "BUILD_IMAGE": buildah.base("bookworm", "amd64"),
            }
            buildah.image("server", "--platform", platform, **bases)
            made[platform] = f"byteps-server:{TAG}-{arch}"
        return made[platform]

    return build


@pytest.fixture(scope="session")
def wheel_for() -> Callable[[str], Path]:
    """Builds the wheel for a machine, "x86_64" or "aarch64"."""
    made: dict[str, Path] = {}

    def build(machine: str) -> Path:
        if machine not in made:
            run(ROOT / "scripts/wheel.sh", "--arch", machine)
            (made[machine],) = (ROOT / "build/dist").glob(f"megatron_byteps-*_{machine}.whl")
        return made[machine]

    return build


def _worker(buildah: Buildah, wheel_for: Callable[[str], Path], *options: str) -> None:
    wheel_for(subprocess.run(["uname", "-m"], capture_output=True, text=True).stdout.strip())
    base = buildah.base(SUITE, "amd64", "python3", "python3-venv")
    buildah.image("worker", *options, CUDA_IMAGE=base)


@pytest.fixture(scope="session")
def worker_image(buildah: Buildah, wheel_for: Callable[[str], Path]) -> str:
    """The workers' image on a base without CUDA, as scripts/images.sh builds it."""
    _worker(buildah, wheel_for)
    return f"megatron-byteps-worker:{TAG}"


@pytest.fixture(scope="session")
def ray_image(buildah: Buildah, wheel_for: Callable[[str], Path]) -> str:
    """The workers' image for jobs under Ray."""
    _worker(buildah, wheel_for, "--with", "ray")
    return f"megatron-byteps-worker-ray:{TAG}"


@pytest.fixture
def podman(buildah: Buildah, tmp_path: Path) -> Iterator[Podman]:
    folder = tmp_path / "podman"
    folder.mkdir()
    made = Podman(folder, buildah.storage_conf())
    yield made
    made.close()
