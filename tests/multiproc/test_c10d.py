"""Any PyTorch program: a backend of torch.distributed, and hooks for DDP and FSDP2."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from byteps.torch.c10d import hooks

from tests.multiproc.cluster import (
    RUN_S,
    Cluster,
    Spawned,
    clean_environment,
    resident_bytes,
)
from tests.multiproc.endings import demand_error, lose

MOST_GROWTH = 32 << 20
"""Limit for a server's memory growth over thousands of sums, in bytes."""

FLAT = {"BYTEPS_C10D_BACKEND": "flat", "BYTEPS_START_TIMEOUT_S": "100"}
SHORT = {**FLAT, "BYTEPS_PEER_TIMEOUT_S": "3"}

SCRIPT = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.full((40_000,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
assert (tensor == 3).all()
group = type(dist.group.WORLD).__name__
print(f"rank {dist.get_rank()}: {group}, {dist.get_backend()}", flush=True)
dist.destroy_process_group()
"""


def test_collectives(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=3, servers=2, env=FLAT).run("c10d:collectives")


def test_models(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=4, servers=2, env=FLAT).run("c10d:models")


def test_gathers_do_not_hang(make_cluster: Callable[..., Cluster]) -> None:
    """torch once started all-gathers with the GIL held, while gloo's threads held a lock and waited
    for the GIL."""
    make_cluster(workers=2, servers=1, env=FLAT).run("c10d:gathers", timeout_s=100, rounds=5000)


def test_torch_finds_every_method_that_starts_an_operation() -> None:
    """torch never starts an operation with the GIL held, under any name that its C++ looks up."""
    folder = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    (header,) = folder.rglob("PyProcessGroup.hpp")
    text = re.sub(r"/\*.*?\*/", "", header.read_text())
    names = {
        *re.findall(r"WORK_OVERRIDE\(\s*ProcessGroup,\s*(\w+)", text),
        *re.findall(r'get_override\(\s*static_cast<const ProcessGroup\*>\(this\),\s*"(\w+)"', text),
    }
    assert "barrier" in names
    assert not names - vars(hooks.BytePSGroup).keys()


def test_hook_of_fsdp(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=4, servers=2, env=FLAT).run("c10d:fsdp_hook")


def test_ranks_of_a_host_reduce_first(make_cluster: Callable[..., Cluster]) -> None:
    env = {**FLAT, "BYTEPS_C10D_BACKEND": "node-first"}
    make_cluster(workers=4, servers=2, env=env).run("c10d:collectives", per_host=2)


def test_fewer_bits_on_the_wire(make_cluster: Callable[..., Cluster]) -> None:
    """Integers below 256 are exact in bf16."""
    env = {**FLAT, "BYTEPS_C10D_WIRE_DTYPE": "bf16"}
    make_cluster(workers=2, servers=1, env=env).run("c10d:collectives")


def test_each_bucket_keeps_its_rounding_losses(make_cluster: Callable[..., Cluster]) -> None:
    env = {**FLAT, "BYTEPS_C10D_WIRE_DTYPE": "int4"}
    make_cluster(workers=2, servers=1, env=env).run("c10d:keeps_losses_apart")


def test_hosts_with_different_settings_say_which(make_cluster: Callable[..., Cluster]) -> None:
    """All ranks end before the first sum, which would otherwise wait for ever."""
    cluster = make_cluster(workers=2, servers=1, env=SHORT)
    cluster.start_nodes()
    workers = [
        cluster.start_worker(rank, "c10d:loop", env={"BYTEPS_C10D_WIRE_DTYPE": wire})
        for rank, wire in enumerate(("int8", "same"))
    ]
    for worker in workers:
        demand_error(worker, "values of BYTEPS_C10D_WIRE_DTYPE: int8 on rank 0, same on rank 1")


@pytest.mark.parametrize(
    ("rounds", "sizes", "most"),
    [
        (4500, 1500, 1024),  # There are more lengths than names.
        pytest.param(10_000, 500, 500, marks=pytest.mark.thorough),
    ],
)
def test_many_sizes(
    make_cluster: Callable[..., Cluster], rounds: int, sizes: int, most: int
) -> None:
    """The number of names is bounded, and the memory of workers and server does not grow."""
    env = {**FLAT, "BYTEPS_C10D_MIN_BYTES": "4096"}
    cluster = make_cluster(workers=2, servers=1, env=env)
    cluster.start("c10d:many_sizes", rounds=rounds, sizes=sizes, most=most)
    held = []
    for number in (1, 2):
        cluster.wait_mark(f"looked{number}", range(2), RUN_S)
        held.append(resident_bytes(cluster.servers[0].pid))
        cluster.go(f"look{number}")
    cluster.finish()
    assert held[1] - held[0] <= MOST_GROWTH, held


@pytest.mark.parametrize(("program", "lost"), [("loop", "worker"), ("ddp_loop", "server")])
def test_a_lost_process_is_named(
    make_cluster: Callable[..., Cluster], program: str, lost: str
) -> None:
    """Every rank sees the loss, whether it waits for an all-reduce or in DDP."""
    cluster = make_cluster(workers=3, servers=2, env=SHORT)
    cluster.start(f"c10d:{program}")
    cluster.wait_mark("looping", range(3))
    survivors = lose(cluster, lost)
    pattern = rf"{lost}\b.*lost|lost.*{lost}\b|the {lost}\b"
    for worker in survivors:
        if program == "loop":
            demand_error(worker, pattern)
        else:  # The error may come out of DDP's C++, as a RuntimeError that quotes it.
            assert worker.status == 1, f"{worker.title}: exit status {worker.status}"
            assert re.search(rf"BytePSError: .*({pattern})", worker.text), worker.text


def test_a_script_that_does_not_know_of_it(tmp_path: Path) -> None:
    """An environment variable under torchrun is enough: scheduler and servers start
    automatically."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {**clean_environment(tmp_path), "BYTEPS_C10D": "1", "BYTEPS_LOG_FORMAT": "json", **FLAT}
    del env["BYTEPS_SECRET"]
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    job = Spawned("job", [sys.executable, *words], env, tmp_path)
    assert job.wait(RUN_S) == 0, job.text
    for rank in range(2):
        assert f"rank {rank}: BytePSGroup, gloo" in job.text, job.text
    decisions = [line for line in job.text.splitlines() if "all-reduces of float32" in line]
    assert [json.loads(line)["severity"] for line in decisions] == ["INFO"], job.text
