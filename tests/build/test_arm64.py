"""The arm64 server, cross-compiled, as the server of x86-64 workers, on an emulated CPU."""

from __future__ import annotations

import platform
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest


from tests.multiproc.cluster import Cluster, Nursery, Spawned
from tests.multiproc.cluster_fixtures import nursery
from tests.build.elf import needs

ROOT = Path(__file__).resolve().parents[2]

__all__ = ["nursery"]

QEMU = "qemu-aarch64-static"
LIBRARIES = "/usr/aarch64-linux-gnu"
"""Where Debian's cross-compiler has arm64's C library."""
CPUS = {"cortex-a53": "armv8.0", "cortex-a76": "fp16 and no bf16", "max": "all that there is"}
PARTITION = 4096

pytestmark = [pytest.mark.requires("arm64"), pytest.mark.thorough]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """byteps-server out of the archive that is shipped."""
    folder = tmp_path_factory.mktemp("arm64")
    done = subprocess.run(
        [ROOT / "scripts/wheel.sh", "--server-only", "--arch", "aarch64", "--out", folder],
        capture_output=True, text=True, check=False, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("byteps-server-*-linux-aarch64.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (program,) = folder.glob("byteps-server-*/bin/byteps-server")
    return program


def emulated(program: Path, cpu: str) -> list[str]:
    return [QEMU, "-cpu", cpu, "-L", LIBRARIES, str(program)]


class ArmCluster(Cluster):
    """A cluster whose scheduler and workers are this machine's, and whose servers are arm64's."""

    command: list[str]

    def start_server(self) -> Spawned:
        title = f"server {len(self.servers)}"
        command = [*self.command, "--role", "server"]
        server = Spawned(title, command, self.node_environment(), self.folder)
        self.servers.append(server)
        return server


@pytest.fixture(params=CPUS)
def cluster(
    request: pytest.FixtureRequest,
    server: Path,
    nursery: Nursery,  # noqa: F811
    run_dir: Path,
) -> Iterator[ArmCluster]:
    env = {"BYTEPS_PARTITION_BYTES": str(PARTITION), "BYTEPS_OP_TIMEOUT_S": "60"}
    with ArmCluster(run_dir / "cluster", nursery, workers=2, servers=2, env=env) as made:
        made.command = emulated(server, request.param)
        yield made


@pytest.mark.timeout(1800)
def test_it_is_for_arm64_and_needs_the_c_library_alone(server: Path) -> None:
    found = needs(server)
    assert found.machine == "aarch64"
    assert platform.machine() == "x86_64", "elsewhere this would be no cross-compilation"
    found.demand_portable()


@pytest.mark.parametrize("cpu", CPUS)
def test_what_it_chooses(server: Path, cpu: str) -> None:
    said = subprocess.run(
        [*emulated(server, cpu), "--features"], capture_output=True, text=True, check=True
    ).stdout
    lines = dict(line.split(": ", 1) for line in said.splitlines())
    assert lines["additions"] == "armv8-a"
    # Compiled in, and there is no arm64 libibverbs here to be loaded.
    assert lines["rdma"].startswith("no: ") and "libibverbs.so.1" in lines["rdma"]


@pytest.mark.timeout(900)
def test_right_sums_in_every_dtype(cluster: ArmCluster) -> None:
    cluster.run("sums:every_dtype", timeout_s=600, partition_bytes=PARTITION)


@pytest.mark.timeout(900)
def test_blocks_of_few_bits_are_those_of_x86(cluster: ArmCluster) -> None:
    """The workers are this machine's, and compare with a reference to the bit."""
    cluster.set_env({"BYTEPS_DETERMINISTIC": "1", "BYTEPS_PARTITION_BYTES": "270336"})
    cluster.run("few_bits:sums", timeout_s=600)
