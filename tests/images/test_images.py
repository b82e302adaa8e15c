"""The server's image, built for both platforms, and its arm64 one as the server of x86-64 workers.

Needs no Docker engine: buildah builds in a chroot, on a base made with debootstrap, and arm64 runs
on an emulated processor. Slow, and so not a part of `make test`: `make test-images`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/multiproc"))

from cluster import Cluster, Spawned  # noqa: E402
from cluster_fixtures import nursery  # noqa: E402

__all__ = ["nursery"]

PLATFORMS = ("linux/amd64", "linux/arm64")
LARGEST = 120_000_000
BINFMT = Path("/proc/sys/fs/binfmt_misc")
EMULATOR = Path("/usr/lib/binfmt.d/qemu-aarch64.conf")
CACHE = Path(
    os.environ.get("MEGATRON_BYTEPS_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "megatron-byteps")
)

pytestmark = [pytest.mark.requires("root", "images"), pytest.mark.timeout(3600)]


def run(*command: str | Path, **env: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "BUILDAH_ISOLATION": "chroot", **env},
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{said[-4000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def emulator() -> None:
    """The kernel starts arm64 programs under qemu."""
    if not (BINFMT / "register").exists():
        run("mount", "-t", "binfmt_misc", "binfmt_misc", BINFMT)
    if not (BINFMT / "qemu-aarch64").exists():
        line = EMULATOR.read_text().strip()
        # Bytes that are escaped there: the kernel reads the escapes itself.
        (BINFMT / "register").write_text(line)


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment that gives buildah storage of its own."""
    folder = tmp_path_factory.mktemp("storage")
    config = folder / "storage.conf"
    config.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    )
    yield {"CONTAINERS_STORAGE_CONF": str(config)}
    run("buildah", "rmi", "--all", "--force", CONTAINERS_STORAGE_CONF=str(config))


@pytest.fixture(scope="session")
def images(emulator: None, storage: dict[str, str]) -> dict[str, str]:
    """The image of each platform, as scripts/images.sh builds it."""
    run(ROOT / "scripts/wheel.sh", "--server-only")
    names = {}
    for platform in PLATFORMS:
        # Its own name: one name would be one platform's.
        base = f"localhost/debian-base:{platform.removeprefix('linux/')}"
        run(ROOT / "tests/images/bases.sh", platform, base, CACHE / "images", **storage)
        run(
            ROOT / "scripts/images.sh", "server", "--platform", platform,
            DEBIAN_IMAGE=base, **storage,
        )  # fmt: skip
        tag = next(
            line.partition("=")[2]
            for line in (ROOT / "docker/versions.env").read_text().splitlines()
            if line.startswith("IMAGE_TAG=")
        )
        names[platform] = f"byteps-server:{tag}-{platform.removeprefix('linux/')}"
    return names


@pytest.fixture(params=PLATFORMS)
def image(request: pytest.FixtureRequest, images: dict[str, str]) -> tuple[str, str]:
    return request.param, images[request.param]


@pytest.fixture
def container(
    images: dict[str, str], storage: dict[str, str], request: pytest.FixtureRequest
) -> Iterator[str]:
    platform = request.param
    arch = platform.removeprefix("linux/")
    name = run("buildah", "from", "--pull-never", "--arch", arch, images[platform], **storage)
    yield name.strip()
    run("buildah", "rm", name.strip(), **storage)


def test_what_the_image_is(image: tuple[str, str], storage: dict[str, str]) -> None:
    platform, name = image
    told = json.loads(run("buildah", "inspect", "--type", "image", name, **storage))
    docker = told["Docker"]
    config = docker["config"]
    assert f"{docker['os']}/{docker['architecture']}" == platform
    assert config["User"] == "10001:10001"
    assert config["Healthcheck"]["Test"] == ["CMD", "byteps-server", "--health"]
    assert config["Entrypoint"] == ["byteps-server"]
    assert config["Labels"]["org.opencontainers.image.title"] == "byteps-server"
    listed = json.loads(run("buildah", "images", "--json", name, **storage))
    size = float(listed[0]["size"].split()[0])
    unit = {"KB": 1e3, "MB": 1e6, "GB": 1e9}[listed[0]["size"].split()[1]]
    assert size * unit < LARGEST, listed[0]["size"]


@pytest.mark.parametrize("container", PLATFORMS, indirect=True)
def test_it_has_rdma_and_says_so(container: str, storage: dict[str, str]) -> None:
    said = run("buildah", "run", container, "--", "byteps-server", "--features", **storage)
    lines = dict(line.split(": ", 1) for line in said.splitlines())
    assert lines["rdma"] == "yes"
    assert lines["prometheus"] == "yes"
    user = run("buildah", "run", container, "--", "id", "-u", **storage)
    assert user.strip() == "10001"


class ImageCluster(Cluster):
    """Servers in containers, on this machine's network; all else is this machine's."""

    container: str
    storage: dict[str, str]

    def start_server(self) -> Spawned:
        title = f"server {len(self.servers)}"
        env = {**self.node_environment(), **self.storage, "BUILDAH_ISOLATION": "chroot"}
        passed = [n for n in env if n.startswith(("DMLC_", "BYTEPS_"))]
        command = ["buildah", "run"]
        for name in passed:
            command += ["--env", f"{name}={env[name]}"]
        # One socket for each: they share the container's files.
        command += ["--env", f"BYTEPS_HEALTH_SOCKET=/run/byteps/{len(self.servers)}.sock"]
        command += [self.container, "--", "byteps-server", "--role", "server"]
        server = Spawned(title, command, env, self.folder)
        self.servers.append(server)
        return server


@pytest.mark.parametrize("container", ["linux/arm64"], indirect=True)
def test_arm64_servers_of_x86_workers(
    container: str,
    storage: dict[str, str],
    nursery: object,
    run_dir: Path,
) -> None:
    env = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_OP_TIMEOUT_S": "120"}
    folder = run_dir / "cluster"
    with ImageCluster(folder, nursery, workers=2, servers=2, env=env) as cluster:
        cluster.container, cluster.storage = container, storage
        cluster.run("sums:every_dtype", timeout_s=1200, partition_bytes=4096)
