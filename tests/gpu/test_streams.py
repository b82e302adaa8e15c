"""All-reduces that streams wait for: `make test-gpu`, on a machine with one GPU or more."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import Cluster
from tests.multiproc.endings import lose

pytestmark = pytest.mark.requires("gpu")

FLAT = {"BYTEPS_C10D_BACKEND": "flat", "BYTEPS_START_TIMEOUT_S": "100"}
NODE_FIRST = {**FLAT, "BYTEPS_C10D_BACKEND": "node-first"}
SHORT = {**FLAT, "BYTEPS_PEER_TIMEOUT_S": "3"}
AWAITED = {**FLAT, "BYTEPS_STREAMED_BYTES": "0"}
"""Too little pinned memory: the host waits."""
STARTS, AT_ONCE = 30, 10


@pytest.mark.parametrize("env", [FLAT, AWAITED], ids=["streamed", "awaited"])
def test_collectives(make_cluster: Callable[..., Cluster], env: dict[str, str]) -> None:
    make_cluster(workers=2, servers=2, env=env).run("c10d:collectives", device="cuda")


def test_one_queue_of_the_device(make_cluster: Callable[..., Cluster]) -> None:
    env = {**FLAT, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    make_cluster(workers=2, servers=2, env=env).run("c10d:collectives", device="cuda")


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_fewer_bits(make_cluster: Callable[..., Cluster], wire: str) -> None:
    """Small whole numbers are exact in bf16; blocks of 8 bits are decoded by a kernel."""
    env = {**FLAT, "BYTEPS_C10D_WIRE_DTYPE": wire}
    program = "collectives" if wire == "bf16" else "first_step"
    make_cluster(workers=2, servers=1, env=env).run(f"c10d:{program}", device="cuda")


def test_streams(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=FLAT).run("c10d:streams", device="cuda")


def test_ranks_of_a_host_reduce_first(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=4, servers=2, env=NODE_FIRST)
    cluster.run("c10d:collectives", per_host=2, device="cuda")


@pytest.mark.parametrize("env", [FLAT, NODE_FIRST], ids=["flat", "node-first"])
def test_models(make_cluster: Callable[..., Cluster], env: dict[str, str]) -> None:
    make_cluster(workers=4, servers=2, env=env).run("c10d:models", per_host=2, device="cuda")


def test_hook_of_fsdp(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=4, servers=2, env=FLAT)
    cluster.run("c10d:fsdp_hook", per_host=2, device="cuda")


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_first_steps(make_cluster: Callable[..., Cluster], loading: str) -> None:
    """Kernels are loaded while streams wait, which holds up all who ask the driver for a copy."""
    env = {**FLAT, "CUDA_MODULE_LOADING": loading}
    for _ in range(STARTS // AT_ONCE):
        clusters = [make_cluster(workers=2, servers=1, env=env) for _ in range(AT_ONCE)]
        for cluster in clusters:
            cluster.start("c10d:first_step", device="cuda")
        for cluster in clusters:
            cluster.finish()


@pytest.mark.parametrize("lost", ["worker", "server", "scheduler"])
@pytest.mark.parametrize("program", ["loop", "ddp_loop"])
def test_what_is_lost_is_named(
    make_cluster: Callable[..., Cluster], program: str, lost: str
) -> None:
    cluster = make_cluster(workers=2, servers=2, env=SHORT)
    cluster.start(f"c10d:{program}", device="cuda")
    cluster.wait_mark("looping", range(2))
    survivors = lose(cluster, lost)
    for worker in survivors:
        assert worker.status == 1, f"{worker.title}: exit status {worker.status}"
        assert re.search(rf"BytePSError: .*{lost}", worker.text), worker.text
