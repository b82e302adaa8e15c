"""Workers that sum, round after round, and check every value, while a test breaks what is below."""

from __future__ import annotations

import time

import byteps.torch as bps
import torch

from tests.multiproc.programs.job import Job

TENSORS = {"small": 700, "middle": 60_000, "large": 1_000_000}
"""Elements: one message that is copied, some partitions, and many."""


def _values(rank: int, round_: int, index: int, count: int) -> torch.Tensor:
    """Whole numbers, different for each rank, round, tensor and element."""
    ramp = torch.arange(count, dtype=torch.float32) % 251
    return ramp + (rank + 1) * 1000 + round_ % 97 * 7 + index


def _sum(size: int, round_: int, index: int, count: int) -> torch.Tensor:
    ramp = torch.arange(count, dtype=torch.float32) % 251
    return size * (ramp + round_ % 97 * 7 + index) + 1000 * size * (size + 1) / 2


def checked(job: Job) -> None:
    """Rounds until the test says "end" (or args["rounds"]); every sum is exact.

    Tensors have args["most"] elements at most; the test may take args["limit_s"].
    """
    bps.init()
    round_ = 0
    last = job.args.get("rounds", 0)
    deadline = time.monotonic() + job.args.get("limit_s", 120)
    counts = {name: min(count, job.args.get("most", count)) for name, count in TENSORS.items()}
    ended = torch.zeros(1)
    with job.check("every sum"):
        while ended.item() == 0:
            assert time.monotonic() < deadline, "the test gave no sign"
            handles = []
            for index, (name, count) in enumerate(counts.items()):
                tensor = _values(job.rank, round_, index, count)
                handles.append(
                    (bps.push_pull_async_inplace(tensor, average=False, name=name), tensor)
                )
            for index, (handle, tensor) in enumerate(handles):
                bps.synchronize(handle)
                wanted = _sum(job.size, round_, index, len(tensor))
                wrong = (tensor != wanted).nonzero()
                assert not len(wrong), f"round {round_}, tensor {index}: {len(wrong)} are wrong"
            round_ += 1
            if round_ == 3:
                job.mark("looping")
            ended = torch.tensor([float(last == round_ or (job.folder / "go.end").exists())])
            ended = bps.push_pull(ended, average=False, name="ended")
            job.note("rounds", str(round_))
    bps.shutdown()
