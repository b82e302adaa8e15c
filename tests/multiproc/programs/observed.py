"""Known jobs, whose figures and timelines the tests look at."""

from __future__ import annotations

import time

import byteps.torch as bps
import torch

from tests.multiproc.programs.job import Job

ROUNDS = 3
LARGE = 2500
"""Elements of fp32: 10,000 bytes, three partitions of at most 4096."""
SMALL = 100
"""Elements: one partition."""
PARTITIONS = 4
"""Of both tensors."""


def known(job: Job) -> None:
    """ROUNDS sums of two tensors; then it waits to be looked at."""
    bps.init()
    for _ in range(ROUNDS):
        handle = bps.push_pull_async(torch.ones(LARGE), average=False, name="large")
        bps.push_pull(torch.ones(SMALL), average=True, name="small")
        bps.synchronize(handle)
    job.mark("done")
    with job.check("get_metrics agrees with the job"):
        metrics = bps.get_metrics()
        assert metrics["byteps_worker_operations_total"] == 2 * ROUNDS, metrics
        assert metrics["byteps_worker_pushed_bytes_total"] == ROUNDS * 4 * (LARGE + SMALL), metrics
        spread = metrics["byteps_worker_operation_seconds"]
        assert spread.count == 2 * ROUNDS, spread
        assert list(spread.buckets.values()) == sorted(spread.buckets.values()), spread
        assert spread.sum > 0, spread
    job.wait_go("end")
    bps.shutdown()
    with job.check("get_metrics after shutdown"):
        assert bps.get_metrics()["byteps_worker_operations_total"] == 2 * ROUNDS


def waiting(job: Job) -> None:
    """Worker 0 pushes and worker 1 does not, until the test says so."""
    with job.check("get_metrics before init"):
        assert bps.get_metrics()["byteps_worker_pushed_partitions_total"] == 0
    bps.init()
    bps.push_pull(torch.ones(SMALL), average=False, name="small")
    tensor = torch.ones(LARGE)
    if job.rank == 0:
        handle = bps.push_pull_async_inplace(tensor, average=False, name="large")
        pushed = "byteps_worker_pushed_partitions_total"
        job.wait_until("all pushes", lambda: bps.get_metrics()[pushed] == PARTITIONS)
        job.mark("pushed")
        bps.synchronize(handle)
    else:
        job.wait_go("push")
        bps.push_pull_inplace(tensor, average=False, name="large")
    bps.shutdown()


def disagreeing(job: Job) -> None:
    """Each worker has another idea of the size of a tensor; one of them is told so."""
    bps.init()
    bps.push_pull(torch.ones(SMALL), average=False, name="small")
    try:
        bps.push_pull(torch.ones(SMALL + job.rank), average=False, name="other")
    except bps.BytePSError:
        job.note("refused", str(bps.get_metrics()["byteps_worker_failed_requests_total"]))
    job.mark("done")
    job.wait_go("end")
    bps.shutdown()


def odd_names(job: Job) -> None:
    """Sums under names that have to be escaped in JSON."""
    bps.init()
    for name in job.args["names"]:
        bps.push_pull(torch.ones(SMALL), average=False, name=name)
    bps.shutdown()


def two_lives(job: Job) -> None:
    """Leaves the job and comes back."""
    bps.init()
    bps.push_pull(torch.ones(SMALL), average=False, name="before")
    bps.suspend()
    bps.resume(job.size, 1, job.rank)
    bps.push_pull(torch.ones(SMALL), average=False, name="after")
    bps.shutdown()


def straggling(job: Job) -> None:
    """Sums until the test says so, to which the last worker always comes late."""
    bps.init()
    tensor, ends = torch.ones(LARGE), job.folder / "go.end"
    deadline = time.monotonic() + 100.0
    job.mark("looping")
    while time.monotonic() < deadline:
        if job.rank == job.size - 1:
            time.sleep(0.02)
        bps.push_pull_inplace(tensor.fill_(1.0), average=False, name="large")
        # All leave after the same sum.
        asked = torch.tensor([1.0 if ends.exists() else 0.0])
        if bps.push_pull(asked, average=False, name="asked").item() == job.size:
            break
    bps.shutdown()


def drained(job: Job) -> None:
    """Worker 0 pushes, worker 1 when the test says so; then they sum until that fails."""
    bps.init()
    bps.push_pull(torch.ones(SMALL), average=False, name="small")
    if job.rank == 0:
        total = bps.push_pull(torch.ones(LARGE), average=False, name="large")
    else:
        job.wait_go("push")
        total = bps.push_pull(torch.ones(LARGE), average=False, name="large")
    with job.check("the sum is right"):
        assert torch.equal(total, torch.full((LARGE,), 2.0)), total
    job.mark("summed")
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        time.sleep(0.01)
        bps.push_pull(torch.ones(SMALL), average=False, name="small")
