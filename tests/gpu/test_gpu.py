"""Sums of GPU tensors, also on streams, and freed memory: `make test-gpu`, on a machine
with a GPU."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.children import free_ports
from tests.layouts.job import CUDA, Job
from tests.multiproc.cluster import END_S, Cluster, wait_all
from tests.multiproc.endings import lose
from tests.multiproc.test_observed import run_metrics

pytestmark = pytest.mark.requires("gpu")

SMALL = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_OP_TIMEOUT_S": "60"}
TINY_POOL = {**SMALL, "BYTEPS_PINNED_BYTES": "1"}
"""Pinned memory for a single partition, so that all others wait for it."""


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


@pytest.mark.parametrize("program", ["distributed", "clipped", "compressed", "state"])
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


def test_an_interrupted_wait_on_a_gpu(make_cluster: Callable[..., Cluster]) -> None:
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
    make_cluster(workers=2, env={**SMALL, **trace}).run("devices:rounds_in_flight", device="cuda")
    text = (folder / "byteps-worker-0.json").read_text()
    for wanted in ("copies from the GPU", "copies to the GPU", '"copy from GPU"', '"copy to GPU"'):
        assert wanted in text, wanted


def test_metrics_of_a_step(make_cluster: Callable[..., Cluster]) -> None:
    run_metrics(make_cluster(workers=2), "cuda")


def test_peer_dies_while_an_nccl_kernel_runs(make_cluster: Callable[..., Cluster]) -> None:
    """The survivor gets an error that names the lost rank, and shuts down, though its GPU never
    finishes."""
    nccl = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        # Ranks may share a GPU if each looks like another host.
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


# All-reduces that streams wait for.


FLAT = {"BYTEPS_C10D_BACKEND": "flat", "BYTEPS_START_TIMEOUT_S": "100"}
NODE_FIRST = {**FLAT, "BYTEPS_C10D_BACKEND": "node-first"}
SHORT = {**FLAT, "BYTEPS_PEER_TIMEOUT_S": "3"}
AWAITED = {**FLAT, "BYTEPS_STREAMED_BYTES": "0"}
"""With too little pinned memory for streamed sums, the host waits."""
STARTS, AT_ONCE = 30, 10


@pytest.mark.parametrize("env", [FLAT, AWAITED], ids=["streamed", "awaited"])
def test_collectives(make_cluster: Callable[..., Cluster], env: dict[str, str]) -> None:
    make_cluster(workers=2, servers=2, env=env).run("c10d:collectives", device="cuda")


def test_one_queue_of_the_device(make_cluster: Callable[..., Cluster]) -> None:
    env = {**FLAT, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    make_cluster(workers=2, servers=2, env=env).run("c10d:collectives", device="cuda")


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_sums_of_gpu_tensors_in_few_bits(make_cluster: Callable[..., Cluster], wire: str) -> None:
    """Small integers are exact in bf16; a kernel decodes blocks of 8 bits."""
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
    """Kernels are loaded while streams wait; this blocks all threads that ask the driver for a
    copy."""
    env = {**FLAT, "CUDA_MODULE_LOADING": loading}
    for _ in range(STARTS // AT_ONCE):
        clusters = [make_cluster(workers=2, servers=1, env=env) for _ in range(AT_ONCE)]
        for cluster in clusters:
            cluster.start("c10d:first_step", device="cuda")
        for cluster in clusters:
            cluster.finish()


@pytest.mark.parametrize("lost", ["worker", "server", "scheduler"])
@pytest.mark.parametrize("program", ["loop", "ddp_loop"])
def test_each_rank_names_the_lost_rank(
    make_cluster: Callable[..., Cluster], program: str, lost: str
) -> None:
    cluster = make_cluster(workers=2, servers=2, env=SHORT)
    cluster.start(f"c10d:{program}", device="cuda")
    cluster.wait_mark("looping", range(2))
    survivors = lose(cluster, lost)
    for worker in survivors:
        assert worker.status == 1, f"{worker.title}: exit status {worker.status}"
        assert re.search(rf"BytePSError: .*{lost}", worker.text), worker.text


# Buffers that leave the GPU between steps: `make test-gpu PYTEST_ARGS="-k offload -s"`.


WIDTH = 4096
PARAMETERS = 4 * WIDTH * (WIDTH + 1)


def trained(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    job = Job(
        folder=folder,
        program="tests.layouts.gpt.offload:train",
        ranks=2,
        settings={"width": WIDTH, **settings},
        platform=CUDA,
    )
    job.run()
    return job.results()


def test_offload_gives_the_memory_back_and_changes_no_bit(run_dir: Path) -> None:
    away = trained(run_dir / "away", away=True, through_byteps=True)
    stays = trained(run_dir / "stays", away=False, through_byteps=True)
    nccl = trained(run_dir / "nccl", away=False, through_byteps=False)
    for ways in zip(away, stays, nccl, strict=True):
        first, *others = (way["checksums"] for way in ways)
        assert len(set(first)) == len(first), "a step changed nothing"
        assert all(other == first for other in others)
    for name, ranks in (("away", away), ("stays", stays), ("NCCL", nccl)):
        for rank, rank_result in enumerate(ranks):
            shown = ", ".join(
                f"{phase} {n / 2**20:,.0f} MiB" for phase, n in rank_result["bytes"].items()
            )
            print(f"{name}, rank {rank}: most on the GPU in phase {shown}")
    for rank_result in away:
        # The buffers have bf16 parameters and fp32 gradients.
        assert rank_result["held"]["step"] >= 6 * PARAMETERS
        assert rank_result["held"]["away"] == 0
        # BytePS keeps nothing on the GPU.
        assert rank_result["bytes"]["away"] < 0.05 * rank_result["bytes"]["step"]
