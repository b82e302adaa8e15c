"""Visible effects of reductions in a program: metrics of a step, and names in a profiler."""

from __future__ import annotations

import time

import byteps.torch as bps
import torch
from byteps.torch import spans

from tests.multiproc.programs.devices import device_of
from tests.multiproc.programs.job import Job

COUNT = 50_000
STEPS = 4
LATE_S = 0.5


def metrics(job: Job) -> None:
    """Make a few steps of two sums. In one step rank 1 is late."""
    bps.init()
    device = device_of(job)
    bps.push_pull(torch.ones(COUNT, device=device), average=False, name="first")
    bps.get_step_metrics()
    for step in range(STEPS):
        if step == STEPS - 1 and job.rank == 1:
            job.wait_go("push")
        for name in ("weight", "bias"):
            bps.push_pull(torch.ones(COUNT, device=device), average=False, name=name)
        if step == STEPS - 2 and job.rank == 0:
            job.mark("waits")
    if device.type == "cuda":
        torch.cuda.synchronize()  # The time of a wait is known once the stream is past it.
    seen = bps.get_step_metrics(steps=STEPS)
    sent = 2.0 * 4 * COUNT
    with job.check("bytes of a step"):
        assert seen["byteps/sent_bytes_per_step"] == sent, seen
        assert seen["byteps/received_bytes_per_step"] == sent, seen
    with job.check("members and reconnections"):
        assert (seen["byteps/members"], seen["byteps/reconnections"]) == (job.size, 0), seen
    with job.check("throughput"):
        assert seen["byteps/throughput_bytes_per_s"] > 0, seen
    with job.check("rank 0 waited for rank 1"):
        waited = seen["byteps/exposed_s_per_step"] * STEPS
        if job.rank == 0:
            assert waited > LATE_S, waited
        else:
            assert waited > 0, waited
    with job.check("a computation beside a sum is not exposed"):
        handle = bps.push_pull_async(torch.ones(COUNT, device=device), average=False, name="hidden")
        while not bps.poll(handle):
            time.sleep(0.001)
        before = spans.exposed_seconds()
        bps.synchronize(handle)
        after = spans.exposed_seconds()
        assert before is not None
        assert after is not None
        assert after - before < LATE_S, after - before
    with job.check("the next reading is of what came since"):
        assert bps.get_step_metrics()["byteps/sent_bytes_per_step"] == 4 * COUNT
    with job.check_raises("no steps", ValueError, "steps must be at least 1"):
        bps.get_step_metrics(steps=0)
    bps.shutdown()


class _Ranges:
    """Stands in for torch's calls of NVTX, which have no effect without a profiler."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.open = 0

    def rangePushA(self, name: str) -> None:
        self.begun.append(name)
        self.open += 1

    def rangePop(self) -> None:
        self.open -= 1


def profiled(job: Job) -> None:
    """Make sums and a step of the optimizer on the servers, and look for their names in
    profilers."""
    bps.init()
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = bps.ServerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    ranges = _Ranges()
    spans._nvtx = ranges
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        bps.push_pull(torch.ones(COUNT), average=False, name="weight")
        model(torch.ones(8)).sum().backward()
        optimizer.step()
    names = {event.name for event in profiler.events()}
    wanted = ["byteps.push_pull weight", "byteps.wait weight", "byteps.push ", "byteps.wait param"]
    for name in wanted:
        with job.check(f"torch.profiler shows {name!r}"):
            assert any(range_name.startswith(name) for range_name in names), sorted(names)
        with job.check(f"NVTX shows {name!r}"):
            assert any(range_name.startswith(name) for range_name in ranges.begun), ranges.begun
    with job.check("each range has an end"):
        assert ranges.open == 0
    bps.shutdown()
