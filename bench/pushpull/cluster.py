"""A measurement inside a job that something else started: torchrun, or a script on each host."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from bench.kit.plan import Plan
from bench.pushpull import backends
from bench.pushpull.driver import progress
from bench.pushpull.launch import Launch
from bench.pushpull.rank import choose_device, measure_cases
from bench.pushpull.summary import Run


def run_in_cluster(plan: Plan) -> Run | None:
    """Measure as one rank of the job; every rank calls it. The run on rank 0, None elsewhere.

    A BytePS cluster ends when its workers leave it, so there is one connection for each backend,
    and a launch is a turn of measurements through it.
    """
    size = os.environ["WORLD_SIZE"]
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == size
    dist.init_process_group("gloo", timeout=timedelta(seconds=plan.timeout_s))
    choose_device(plan)
    made = {name: backends.make(name, plan.device) for name in plan.backends}
    run = Run(plan=plan)
    for index in range(plan.launches):
        for name, backend in made.items():
            first_round = index * max(case.warmup + case.iters for case in plan.cases)
            measured = measure_cases(plan, backend, one_clock=one_host, first_round=first_round)
            if measured:
                run.launches.append(Launch(backend=name, index=index, measured=measured, kept=True))
                progress(f"launch {index} {name}: done")
    for backend in made.values():
        backend.close()
    rank = dist.get_rank()
    dist.destroy_process_group()
    return run if rank == 0 else None
