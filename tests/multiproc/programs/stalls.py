"""Workers that sum while processes are stopped."""

from __future__ import annotations

import byteps.torch as bps
import torch

from tests.multiproc.programs.job import Job


def sums(job: Job) -> None:
    """Rank 0 ends the sums when the test says so: all end with the same one."""
    bps.init()
    round_ = 0
    while True:
        last = job.rank == 0 and (job.folder / "go.end").exists()
        given = torch.full((50_000,), float(round_ % 100 + job.rank))
        given[0] = float(last)
        total = bps.push_pull(given, average=False, name="sum")
        want = job.size * (round_ % 100) + job.size * (job.size - 1) / 2
        assert (total[1:] == want).all(), f"round {round_}"
        if total[0] > 0:
            break
        round_ += 1
        if round_ == 5:
            job.mark("summing")
    bps.shutdown()
