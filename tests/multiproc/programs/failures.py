"""Workers for tests in which something is lost; what they raise is noted by Job.run."""

from __future__ import annotations

import time

import byteps.torch as bps
import torch

from programs.job import Job


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


def absent(job: Job) -> None:
    """The rank in args never calls the operation, but stays in the job."""
    bps.init()
    bps.push_pull(torch.ones(10), average=False, name="together")
    job.mark("looping")
    if job.rank == job.args["absent"]:
        job.wait_go("end")
        bps.shutdown()
        return
    bps.push_pull(torch.ones(20_000), average=False, name="layer.grad")


def absent_amid_traffic(job: Job) -> None:
    """As absent, while the others keep the servers busy with another tensor."""
    bps.init()
    bps.push_pull(torch.ones(10), average=False, name="together")
    job.mark("looping")
    if job.rank == job.args["absent"]:
        job.wait_go("end")
        bps.shutdown()
        return
    others = [rank for rank in range(job.size) if rank != job.args["absent"]]
    handle = bps.push_pull_async(torch.ones(2000), average=False, name="layer.grad")
    busy = torch.ones(2000)
    deadline = time.monotonic() + 20
    while not bps.poll(handle) and time.monotonic() < deadline:
        bps.push_pull_inplace(busy, average=True, name="busy", group=others)
    bps.synchronize(handle)


def early_leaver(job: Job) -> None:
    """The rank in args leaves the job in good order while the others wait for its tensor."""
    bps.init()
    bps.push_pull(torch.ones(10), average=False, name="together")
    job.mark("looping")
    if job.rank == job.args["leaver"]:
        time.sleep(0.5)
        bps.shutdown()
        return
    bps.push_pull(torch.ones(20_000), average=False, name="layer.grad")


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
