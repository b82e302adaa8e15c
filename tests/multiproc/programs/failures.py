"""Workers for tests in which something is lost; what they raise is noted by Job.run."""

from __future__ import annotations

import time

import byteps.torch as bps
import torch

from tests.multiproc.programs.job import Job


def loop(job: Job) -> None:
    """Sum for ever; ends by the error that the test is about."""
    bps.init()
    for round_ in range(1_000_000):
        bps.push_pull(torch.ones(20_000), average=False, name=f"loop.{round_ % 3}")
        if round_ == 5:
            job.mark("looping")


def init_only(job: Job) -> None:
    """Join and leave; init may be what fails."""
    bps.init()
    bps.shutdown()


def missing(job: Job) -> None:
    """Rank ``missing`` of args never calls the operation that the others wait for.

    It stays in the job, or with ``leaves`` leaves it in good order. With ``traffic`` the others
    keep the servers busy with another tensor while they wait.
    """
    bps.init()
    bps.push_pull(torch.ones(10), average=False, name="together")
    job.mark("looping")
    if job.rank == job.args["missing"]:
        if job.args.get("leaves"):
            time.sleep(0.5)
        else:
            job.wait_go("end")
        bps.shutdown()
        return
    handle = bps.push_pull_async(torch.ones(20_000), average=False, name="layer.grad")
    if job.args.get("traffic"):
        _keep_busy(job, handle)
    bps.synchronize(handle)


def _keep_busy(job: Job, handle: int) -> None:
    others = [rank for rank in range(job.size) if rank != job.args["missing"]]
    busy = torch.ones(2000)
    deadline = time.monotonic() + 20
    while not bps.poll(handle) and time.monotonic() < deadline:
        bps.push_pull_inplace(busy, average=True, name="busy", group=others)


def steady(job: Job) -> None:
    """Works until the test says so, with a sum now and then."""
    bps.init()
    bps.push_pull(torch.ones(10), average=False, name="first")
    job.mark("looping")
    job.wait_go("end")
    with job.check("still right"):
        total = bps.push_pull(torch.ones(10), average=False, name="last")
        assert (total == job.size).all()
    bps.shutdown()
