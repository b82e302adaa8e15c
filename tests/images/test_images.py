"""The server's image for both platforms, and the arm64 one as the server of x86-64 workers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.releasekit.images import packages
from tests.images.containers import Buildah
from tests.multiproc.cluster import Cluster, Nursery, Spawned

PLATFORMS = ("linux/amd64", "linux/arm64")
LARGEST = 120_000_000
ADDITIONS = {"linux/amd64": "x86-64-v", "linux/arm64": "armv8-a"}
"""The fast paths of sums, one of which each CPU has."""

pytestmark = [pytest.mark.requires("root", "images"), pytest.mark.timeout(3600)]


@pytest.fixture(params=PLATFORMS)
def platform(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def container(platform: str, server_image: Callable[[str], str], buildah: Buildah) -> Iterator[str]:
    with buildah.container(server_image(platform), platform.removeprefix("linux/")) as name:
        yield name


def test_what_the_image_is(
    platform: str, server_image: Callable[[str], str], buildah: Buildah
) -> None:
    name = server_image(platform)
    docker = json.loads(buildah("inspect", "--type", "image", name))["Docker"]
    config = docker["config"]
    assert f"{docker['os']}/{docker['architecture']}" == platform
    assert config["User"] == "10001:10001"
    assert config["Healthcheck"]["Test"] == ["CMD", "byteps-server", "--health"]
    assert config["Entrypoint"] == ["byteps-server"]
    assert config["Labels"]["org.opencontainers.image.title"] == "byteps-server"
    assert buildah.size(name) < LARGEST


def test_it_can_be_saved(
    server_image: Callable[[str], str], buildah: Buildah, tmp_path: Path
) -> None:
    name = server_image("linux/amd64")
    base = buildah.base("bookworm", "amd64")
    where = ("--platform", "linux/amd64", "--save", str(tmp_path))
    buildah.image("server", *where, DEBIAN_IMAGE=base)
    (saved,) = tmp_path.iterdir()
    assert saved.name == f"{name.replace(':', '-')}.image.tar.gz"
    found = {one.name: one.distribution for one in packages(saved)}
    assert {"libssl3", "libibverbs1"} <= set(found)
    assert {*found.values()} == {"debian-12"}


def test_what_it_can_do(platform: str, container: str, buildah: Buildah) -> None:
    said = buildah("run", container, "--", "byteps-server", "--features")
    lines = dict(line.split(": ", 1) for line in said.splitlines())
    assert lines["rdma"] == "yes"
    assert lines["additions"].startswith(ADDITIONS[platform])
    assert buildah("run", container, "--", "id", "-u").strip() == "10001"


class ImageCluster(Cluster):
    """Servers in containers, on this machine's network; all else is this machine's."""

    container: str
    buildah: Buildah

    def start_server(self) -> Spawned:
        number = len(self.servers)
        env = self.node_environment()
        command = ["buildah", "run"]
        for name in env:
            if name.startswith(("DMLC_", "BYTEPS_")):
                command += ["--env", f"{name}={env[name]}"]
        # One socket for each: they share the container's files.
        command += ["--env", f"BYTEPS_HEALTH_SOCKET=/run/byteps/{number}.sock"]
        command += [self.container, "--", "byteps-server", "--role", "server"]
        server = Spawned(f"server {number}", command, {**env, **self.buildah.env}, self.folder)
        self.servers.append(server)
        return server


@pytest.mark.parametrize("platform", ["linux/arm64"])
def test_arm64_servers_of_x86_workers(
    container: str, buildah: Buildah, nursery: Nursery, run_dir: Path
) -> None:
    assert os.uname().machine == "x86_64"
    env = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_OP_TIMEOUT_S": "120"}
    folder = run_dir / "cluster"
    with ImageCluster(folder, nursery, workers=2, servers=2, env=env) as cluster:
        cluster.container, cluster.buildah = container, buildah
        cluster.run("sums:every_dtype", timeout_s=1200, partition_bytes=4096)


@pytest.mark.thorough
def test_a_worker_for_ray(ray_image: str, buildah: Buildah) -> None:
    with buildah.container(ray_image, "amd64") as container:
        program = "import ray, megatron_byteps_ray; print(megatron_byteps_ray.__file__)"
        said = buildah("run", container, "--", "python", "-c", program)
        assert said.startswith("/opt/venv/")
        said = buildah("run", container, "--", "python", "-m", "megatron_byteps_ray", "--help")
        assert said.startswith("usage: ")
