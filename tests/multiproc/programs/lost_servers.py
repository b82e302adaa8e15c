"""Steps of sums, each checked, while servers are lost and others take their places."""

from __future__ import annotations

import time

import byteps.torch as bps
import torch
from byteps.torch.alike import are_alike

from tests.multiproc.programs.job import Job

LENGTHS = {"large": 700_001, "middle": 40_000, "small": 10}


def values_of(rank: int, step: int, length: int) -> torch.Tensor:
    """Whole numbers, of which sums are exact."""
    place = torch.arange(length, dtype=torch.int64) % 4093
    return ((place * 7 + rank * 977 + step * 53) % 20_011).to(torch.float32)


def train(job: Job) -> None:
    """`steps` steps of sums in flight together, each of `pace` seconds at least.

    Before some, `holds`, it waits for the test's sign.
    """
    bps.init()
    kept = torch.zeros(LENGTHS["middle"])
    longest = 0.0
    for step in range(job.args["steps"]):
        if step in job.args.get("holds", ()):
            job.wait_go(str(step))
        began = time.monotonic()
        sums = {name: values_of(job.rank, step, n) for name, n in LENGTHS.items()}
        handles = [
            bps.push_pull_async_inplace(value, average=False, name=name, priority=i)
            for i, (name, value) in enumerate(sums.items())
        ]
        few = torch.sin(values_of(job.rank, step, LENGTHS["middle"]))
        handles.append(
            bps.push_pull_async_inplace(few, average=True, name="few", wire_dtype="int4")
        )
        for handle in handles:
            bps.synchronize(handle)
        for name, value in sums.items():
            parts = [values_of(rank, step, LENGTHS[name]) for rank in range(job.size)]
            exact = torch.stack(parts).double().sum(0).float()
            assert torch.equal(value, exact), f"step {step}: the sum of {name!r} is wrong"
        kept += few
        longest = max(longest, time.monotonic() - began)
        job.note("done", str(step + 1))
        time.sleep(job.args.get("pace", 0))
    assert are_alike([kept], "compare"), "workers have parted"
    job.note("longest", str(longest))
    bps.shutdown()


def with_optimizer(job: Job) -> None:
    """Steps of an optimizer whose state servers keep."""
    bps.init()
    weights = torch.nn.Parameter(torch.ones(100_000))
    optimizer = bps.ServerOptimizer(torch.optim.AdamW([weights], lr=1e-3))
    for step in range(job.args["steps"]):
        weights.grad = torch.full_like(weights, float(step))
        optimizer.step()
        job.note("done", str(step + 1))
        time.sleep(job.args.get("pace", 0))
    bps.shutdown()


def with_copies(job: Job) -> None:
    """The same, each step compared with torch's, to the bit; half of the steps are clipped."""
    bps.init()
    weights = {name: torch.nn.Parameter(torch.ones(n)) for name, n in LENGTHS.items()}
    expected = [torch.nn.Parameter(torch.ones(n)) for n in LENGTHS.values()]
    optimizer = bps.ServerOptimizer(torch.optim.AdamW(weights.values(), lr=1e-3), max_norm=1.0)
    alone = torch.optim.AdamW(expected, lr=1e-3, foreach=False)
    for step in range(job.args["steps"]):
        # The norm is that of one value, a power of two: 8 is clipped to 1.
        norm = 2.0 ** (-11 if step % 4 < 2 else 3)
        scale = torch.tensor(min(1.0, 1.0 / (norm + 1e-6)))
        for i, (weight, other) in enumerate(zip(weights.values(), expected, strict=True)):
            pattern = torch.zeros(weight.shape)
            if i == step % 3:
                pattern[step % 10] = norm
            weight.grad = pattern * (2 * job.rank / max(job.size - 1, 1))
            other.grad = pattern * scale
        optimizer.step()
        alone.step()
        for (name, weight), other in zip(weights.items(), expected, strict=True):
            assert torch.equal(weight, other), f"step {step}: {name!r} is not what torch makes"
        job.note("done", str(step + 1))
        time.sleep(job.args.get("pace", 0))
    bps.shutdown()
