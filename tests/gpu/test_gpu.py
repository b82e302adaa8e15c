"""Sums of tensors on GPUs: `make test-gpu`, on a machine with one or more.

The programs are in tests/multiproc/programs/devices.py; tests/multiproc runs those of them on the
CPU that can run there.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.ports import free_ports
from tests.multiproc.cluster import END_S, Cluster, wait_all

pytestmark = pytest.mark.requires("gpu")

SMALL = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_OP_TIMEOUT_S": "60"}
TINY_POOL = {**SMALL, "BYTEPS_PINNED_BYTES": "1"}
"""Pinned memory for one partition: every other one waits for it."""


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_dtype(make_cluster: Callable[..., Cluster], workers: int) -> None:
    cluster = make_cluster(workers=workers, servers=2, env=SMALL)
    cluster.run("devices:every_dtype", device="cuda")


@pytest.mark.parametrize("env", [SMALL, TINY_POOL], ids=["small", "tiny-pool"])
@pytest.mark.parametrize("program", ["rounds_in_flight", "wire_types", "wanted_part", "streams"])
def test_program(make_cluster: Callable[..., Cluster], program: str, env: dict[str, str]) -> None:
    make_cluster(workers=2, servers=2, env=env).run(f"devices:{program}", device="cuda")


def test_many_loops(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=2, env={**SMALL, "BYTEPS_PUSH_THREAD": "6"})
    cluster.run("devices:rounds_in_flight", device="cuda")


@pytest.mark.parametrize("program", ["distributed", "clipped", "passes", "compressed", "state"])
def test_optimizer(make_cluster: Callable[..., Cluster], program: str) -> None:
    """Upstream's DistributedOptimizer and broadcasts."""
    make_cluster(workers=2, servers=1, env=SMALL).run(f"optimizer:{program}", device="cuda")


@pytest.mark.parametrize("program", ["updates", "clipped", "speculates"])
@pytest.mark.parametrize("env", [SMALL, TINY_POOL], ids=["small", "tiny-pool"])
def test_server_optimizer(
    make_cluster: Callable[..., Cluster], program: str, env: dict[str, str]
) -> None:
    cluster = make_cluster(workers=2, servers=2, env=env)
    cluster.run(f"server_optimizer:{program}", device="cuda")


def test_partitions_of_the_default_size(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=2).run("devices:rounds_in_flight", device="cuda")


def test_current_device_is_kept(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=1, env=SMALL)
    cluster.run("devices:current_device", device="cuda")


def test_interrupted(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=1, env=SMALL)
    cluster.start("devices:interrupted", device="cuda")
    cluster.wait_mark("waiting", [0])
    cluster.workers["worker 0"].send(signal.SIGINT)
    cluster.wait_mark("interrupted", [0])
    cluster.go("push")
    cluster.finish()


def test_timeline_has_the_copies(make_cluster: Callable[..., Cluster], run_dir: Path) -> None:
    folder = run_dir / "timelines"
    trace = {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_DIR": str(folder)}
    make_cluster(workers=2, env={**SMALL, **trace}).run("devices:wanted_part", device="cuda")
    text = (folder / "byteps-worker-0.json").read_text()
    for wanted in ("copies from the GPU", "copies to the GPU", '"copy from GPU"', '"copy to GPU"'):
        assert wanted in text, wanted


def test_peer_dies_while_an_nccl_kernel_runs(make_cluster: Callable[..., Cluster]) -> None:
    """The survivor is told who was lost, and shuts down, though its GPU never finishes."""
    nccl = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        # Ranks may share a GPU when each looks like another host.
        "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    cluster = make_cluster(workers=2, servers=1, env=SMALL)
    cluster.start_nodes()
    nccl["MASTER_PORT"] = str(free_ports())
    for rank in range(2):
        env = {**nccl, "NCCL_HOSTID": str(rank)}
        cluster.start_worker(rank, "devices:peer_dies_under_nccl", env=env, device="cuda")
    cluster.wait_mark("stuck", [0])
    cluster.go("die")
    survivor = cluster.workers["worker 0"]
    wait_all([survivor], END_S)
    assert survivor.status == 0
    assert "worker 1" in (cluster.folder / "failed.0").read_text()
    assert (cluster.folder / "mark.shut_down.0").exists()
