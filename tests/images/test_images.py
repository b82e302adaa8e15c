"""Images for both platforms, a job from the compose file, and the wheels on a minimal system."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.children import captured
from tests.images.containers import ROOT, Buildah, Podman, needs, run
from tests.multiproc.cluster import Cluster, Nursery, Spawned, wait_all

PLATFORMS = ("linux/amd64", "linux/arm64")
LARGEST = 120_000_000
ADDITIONS = {"linux/amd64": "x86-64-v", "linux/arm64": "armv8-a"}
"""Fast paths of sums. Each CPU has one of them."""


@pytest.fixture(params=PLATFORMS)
def platform(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def container(platform: str, server_image: Callable[[str], str], buildah: Buildah) -> Iterator[str]:
    with buildah.container(server_image(platform), platform.removeprefix("linux/")) as name:
        yield name


@pytest.mark.requires("root", "images")
@pytest.mark.timeout(3600)
def test_the_server_image_is_small_and_not_run_by_root(
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


@pytest.mark.requires("root", "images")
@pytest.mark.timeout(3600)
def test_the_server_image_can_be_saved(
    server_image: Callable[[str], str], buildah: Buildah, tmp_path: Path
) -> None:
    name = server_image("linux/amd64")
    base = buildah.base("bookworm", "amd64")
    where = ("--platform", "linux/amd64", "--save", str(tmp_path))
    buildah.image("server", *where, DEBIAN_IMAGE=base)
    (saved,) = tmp_path.iterdir()
    assert saved.name == f"{name.replace(':', '-')}.image.tar.gz"
    with tarfile.open(saved) as packed:
        assert "manifest.json" in packed.getnames()


@pytest.mark.requires("root", "images")
@pytest.mark.timeout(3600)
def test_the_server_image_has_its_features(platform: str, container: str, buildah: Buildah) -> None:
    said = buildah("run", container, "--", "byteps-server", "--features")
    lines = dict(line.split(": ", 1) for line in said.splitlines())
    assert lines["rdma"] == "yes"
    assert lines["additions"].startswith(ADDITIONS[platform])
    assert buildah("run", container, "--", "id", "-u").strip() == "10001"


class ImageCluster(Cluster):
    """Servers in containers on this machine's network; everything else runs on this machine."""

    container: str
    buildah: Buildah

    def start_server(self) -> Spawned:
        number = len(self.servers)
        env = self.node_environment()
        command = ["buildah", "run"]
        for name in env:
            if name.startswith(("DMLC_", "BYTEPS_")):
                command += ["--env", f"{name}={env[name]}"]
        # Each server has a socket of its own name, because the servers share the container's files.
        command += ["--env", f"BYTEPS_HEALTH_SOCKET=/run/byteps/{number}.sock"]
        command += [self.container, "--", "byteps-server", "--role", "server"]
        server = Spawned(f"server {number}", command, {**env, **self.buildah.env}, self.folder)
        self.servers.append(server)
        return server


@pytest.mark.requires("root", "images")
@pytest.mark.timeout(3600)
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


@pytest.mark.requires("root", "images")
@pytest.mark.timeout(3600)
@pytest.mark.thorough
def test_a_worker_for_ray(ray_image: str, buildah: Buildah) -> None:
    with buildah.container(ray_image, "amd64") as container:
        program = "import ray, megatron_byteps_ray; print(megatron_byteps_ray.__file__)"
        said = buildah("run", container, "--", "python", "-c", program)
        assert said.startswith("/opt/venv/")
        said = buildah("run", container, "--", "python", "-m", "megatron_byteps_ray", "--help")
        assert said.startswith("usage: ")


# docker/compose.yaml unchanged: a scheduler, two servers, and two workers that train.


NODES = ("scheduler", "server-0", "server-1")
WORKERS = ("worker-0", "worker-1")
PROJECT = "trial"
LATEST_S = 1800.0


@pytest.fixture(scope="module")
def compose() -> list[str | Path]:
    """Get the command that runs docker/compose.yaml."""
    install = f"source {ROOT}/scripts/lib/system.sh; install_ship_tools {ROOT}"
    run("bash", "-euo", "pipefail", "-c", install)
    docker = ROOT / "docker"
    return [
        "env", f"BYTEPS_SECRET={secrets.token_hex(32)}",
        ROOT / "build/venv-ship/bin/podman-compose", "--no-ansi", "--project-name", PROJECT,
        "--env-file", docker / "versions.env", "--file", docker / "compose.yaml",
    ]  # fmt: skip


def container_of(service: str) -> str:
    return f"{PROJECT}_{service}_1"


def losses(log: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", log)]


@pytest.mark.requires("root", "images")
@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("worker_image")
def test_the_compose_file_trains(
    server_image: Callable[[str], str], podman: Podman, compose: list[str | Path], run_dir: Path
) -> None:
    server_image("linux/amd64")

    def healthy(node: str) -> bool:
        """Run the image's health check, which Docker runs by itself."""
        check = podman.command("podman", "healthcheck", "run", container_of(node))
        return subprocess.run(check, env=podman.full_env, capture_output=True).returncode == 0

    def inspected() -> list[dict[str, Any]]:
        return json.loads(podman("inspect", *map(container_of, (*NODES, *WORKERS))))

    try:
        # Scheduler and servers wait for their workers without a limit.
        podman.run(*compose, "up", "--detach", *NODES)
        deadline = time.monotonic() + LATEST_S
        while not all(healthy(node) for node in NODES):
            assert time.monotonic() < deadline, podman("ps", "--all")
            time.sleep(0.5)
        said = podman("exec", container_of("server-1"), "byteps-server", "--health")
        assert "server waits for the job to gather" in said
        (run_dir / "workers.log").write_text(podman.run(*compose, "up", *WORKERS))
        # Scheduler and servers end by themselves when the workers have ended.
        while any(container["State"]["Running"] for container in inspected()):
            assert time.monotonic() < deadline, podman("ps", "--all")
            time.sleep(0.5)
        containers = inspected()
        ended = {container["Name"]: container["State"]["ExitCode"] for container in containers}
        assert set(ended.values()) == {0}, ended
        # The containers have the restrictions of compose.yaml.
        for container in containers:
            assert container["EffectiveCaps"] in (None, []), container["Name"]
            assert container["Config"]["User"] == "10001:10001", container["Name"]
        # The last rank prints the loss.
        said = podman("logs", container_of("worker-1"))
        assert "iteration       20/      20" in said, said[-4000:]
        fell = losses(said)
        assert len(fell) >= 4 and fell[-1] < fell[0], fell
    finally:
        podman.run(*compose, "down", "--timeout", "5")


# The shipped wheels: their requirements, their contents, and a test after installation.


# A single worker in embedded mode: the wheel's own scheduler and server.
PROGRAM = """
import torch, byteps.torch as bps
bps.init()
tensor = torch.arange(100_000, dtype=torch.float32)
assert torch.equal(bps.push_pull(tensor, average=False, name="t"), tensor)
bps.shutdown()
print("summed by", bps.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel for this machine."""
    folder = tmp_path_factory.mktemp("wheel")
    run(ROOT / "scripts/wheel.sh", "--arch", os.uname().machine, "--out", folder)
    (made,) = folder.glob("*.whl")
    return made


def demand_portable(wheel: Path, machine: str, folder: Path) -> None:
    assert f"-manylinux_2_34_{machine}.whl" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(folder)
    binaries = [name for name in names if name.endswith((".so", "/byteps-server"))]
    assert len(binaries) == 2, binaries
    # Python finds a module by this name only.
    (module,) = [name for name in binaries if name.endswith(".so")]
    assert module.endswith("/c_lib.abi3.so")
    for name in binaries:
        needed = needs(folder / name)
        assert needed.machine == machine
        needed.demand_portable()


@pytest.mark.timeout(1800)
def test_the_wheel_is_portable_and_has_its_data_and_licences(wheel: Path, tmp_path: Path) -> None:
    demand_portable(wheel, os.uname().machine, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "byteps/torch/__init__.py" in names
    assert not [name for name in names if name.endswith((".cc", ".h", ".tar.gz", ".zip"))]
    data = [name.partition("/data/") for name in names if "/patching/data/" in name]
    tracked = subprocess.check_output(
        ["git", "ls-files", "--", "Megatron-LM", "patches", "upstream.lock", ":!patches/byteps"],
        cwd=ROOT, text=True,
    )  # fmt: skip
    packed = {inside for _, _, inside in data if inside and not inside.endswith("/")}
    assert set(tracked.split()) == {name for name in packed if not name.startswith("scripts/")}
    licence_files = [name for name in names if "/licenses/" in name and not name.endswith("/")]
    licences = {Path(name).name for name in licence_files}
    assert licences == {
        *("LICENSE", "NOTICE", "byteps.txt", "libsodium.txt", "nanobind.txt", "robin-map.txt"),
    }


@pytest.mark.timeout(600)
def test_the_installed_wheel_works(wheel: Path, tmp_path: Path) -> None:
    # A new environment that borrows torch: the server is found in the folder of its Python.
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=300)
    python = environment / "bin/python"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([python, *install], check=True, timeout=300)
    (site,) = environment.glob("lib/python3*/site-packages")
    (site / "torch.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = captured([python, "-c", PROGRAM], 500, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"summed by {site}" in done.stdout


@pytest.mark.requires("arm64")
@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_the_arm64_wheel(wheel_for: Callable[[str], Path], tmp_path: Path) -> None:
    demand_portable(wheel_for("aarch64"), "aarch64", tmp_path)


# The wheels, installed by pip in a Debian with Python and without build tools.


SUITE, SITE = "trixie", "lib/python3.13/site-packages"
ALONE = """
import torch, byteps.torch as bps
bps.init()
tensor = torch.arange(100_000, dtype=torch.float32)
assert torch.equal(bps.push_pull(tensor, average=False, name="t"), tensor)
bps.shutdown()
print("summed by", bps.__file__)
"""
"""A single worker in embedded mode: the wheel's own scheduler and server."""
PLAIN_WORKER = Path(__file__).with_name("plain_worker.py")
PARTITION = 4096
MACHINES = ("x86_64", "aarch64")
OURS = ("DMLC_", "BYTEPS_")


@contextmanager
def bare(buildah: Buildah, arch: str, wheel: Path) -> Iterator[str]:
    """A container with the wheel in its own environment, /opt/venv."""
    with buildah.container(buildah.base(SUITE, arch, "python3", "python3-venv"), arch) as container:
        buildah("copy", container, wheel, f"/tmp/{wheel.name}")
        said = buildah(
            "run", container, "--", "sh", "-ec",
            f"""
            for tool in gcc g++ cc make; do if command -v $tool; then exit 1; fi; done
            if ldconfig -p | grep -E 'zmq|verbs|rdmacm|prometheus|cuda'; then exit 1; fi
            python3 -m venv /opt/venv
            /opt/venv/bin/pip install --quiet --no-deps --no-index /tmp/{wheel.name}
            mkdir /opt/torch
            /opt/venv/bin/byteps-server --features""",
        )  # fmt: skip
        # Compiled in, but the system's libraries are missing at load time.
        assert "rdma: no: " in said
        yield container


@pytest.mark.requires("root", "images")
@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_a_job_on_x86(
    worker_image: str, wheel_for: Callable[[str], Path], buildah: Buildah
) -> None:
    with buildah.container(worker_image, "amd64") as worker:
        torch = Path(buildah("mount", worker).strip()) / "opt/venv" / SITE
        with bare(buildah, "amd64", wheel_for("x86_64")) as container:
            # This path comes after the environment's own packages, so `byteps` is the installed
            # package.
            late = f"echo /opt/torch >/opt/venv/{SITE}/late.pth"
            buildah("run", container, "--", "sh", "-ec", late)
            said = buildah(
                "run", "--volume", f"{torch}:/opt/torch:ro", container, "--",
                "/opt/venv/bin/python", "-c", ALONE,
            )  # fmt: skip
    assert "summed by /opt/venv/" in said


@pytest.mark.requires("root", "images")
@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("emulator")
def test_an_arm64_worker_beside_one_of_x86(
    wheel_for: Callable[[str], Path], buildah: Buildah, nursery: Nursery, run_dir: Path
) -> None:
    assert os.uname().machine == "x86_64"
    folder, largest = run_dir / "cluster", str(5 * PARTITION + 24)
    env = {"BYTEPS_PARTITION_BYTES": str(PARTITION), "BYTEPS_OP_TIMEOUT_S": "300",
           "BYTEPS_START_TIMEOUT_S": "300"}  # fmt: skip
    with (
        bare(buildah, "arm64", wheel_for("aarch64")) as container,
        Cluster(folder, nursery, workers=2, servers=2, env=env) as cluster,
    ):
        buildah("copy", container, PLAIN_WORKER, "/opt/plain_worker.py")
        cluster.start_nodes()
        workers = []
        for rank, title in enumerate(("x86 worker", "arm64 worker")):
            own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            full = {**cluster.node_environment(), **own}
            command = [sys.executable, str(PLAIN_WORKER), largest]
            if title.startswith("arm64"):
                variables = [
                    f"--env={k}={v}" for k, v in full.items() if k.startswith(OURS) or k in own
                ]
                python = ["/opt/venv/bin/python", "/opt/plain_worker.py", largest]
                command = ["buildah", "run", *variables, container, "--", *python]
                full |= buildah.env
            workers.append(Spawned(title, command, full, folder))
        try:
            wait_all(workers, 900)
        finally:
            for worker in workers:
                if worker.running:
                    worker.send(signal.SIGKILL)
        assert [worker.wait(0) for worker in workers] == [0, 0], [w.text[-2000:] for w in workers]
        said = [worker.text.splitlines()[-1] for worker in workers]
        assert said == [f"{m}: 24 tensors, 3 rounds, every value right" for m in MACHINES]
        cluster.finish()
