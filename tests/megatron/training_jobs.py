"""Records of a training job's ranks, combined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.layouts.gpt.layout import RankSeen
from tests.layouts.job import Job


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Record of a training run, with full precision: lists over steps."""

    job: Job
    losses: list[float]
    """Losses on rank 0: averages over all ranks."""
    gradients: list[list[Any]]
    """Summed buckets of each step on rank 0, or its shards of them."""
    local_gradients: list[list[list[Any]]]
    """The same buckets on every rank, scaled, before they were summed."""
    parameters: dict[str, Any]
    """Final parameters on rank 0."""
    names: list[str]
    """Names of BytePS operations that rank 0 started, in order; empty without BytePS."""

    @staticmethod
    def of(job: Job) -> Trained:
        seen: list[RankSeen] = job.results()
        first = seen[0]
        losses, gradients = _losses(first), _results(first)
        for other in seen[1:]:
            assert _losses(other) == losses, "ranks report different losses"
            if _holds_all(first):
                assert same(_results(other), gradients), "ranks hold different sums"
        return Trained(
            job=job,
            losses=losses,
            gradients=gradients,
            local_gradients=[
                [[total.local for total in step.sums.values()] for step in seen_rank.steps]
                for seen_rank in seen
            ],
            parameters=first.parameters,
            names=first.names,
        )


def _losses(seen: RankSeen) -> list[float]:
    return [step.loss for step in seen.steps if step.loss is not None]


def _results(seen: RankSeen) -> list[list[Any]]:
    return [[total.result for total in step.sums.values()] for step in seen.steps]


def _holds_all(seen: RankSeen) -> bool:
    """Return whether the rank got whole sums, not shards of the distributed optimizer."""
    return all(
        total.result.shape == total.local.shape
        for step in seen.steps
        for total in step.sums.values()
    )


def same(steps: list[list[Any]], other: list[list[Any]]) -> bool:
    """Return whether two lists of buckets are bit-identical, step by step."""
    import torch

    if [len(step) for step in steps] != [len(step) for step in other]:
        return False
    return all(
        a.dtype == b.dtype and torch.equal(a, b)
        for step, twin in zip(steps, other, strict=True)
        for a, b in zip(step, twin, strict=True)
    )


def assert_same_run(run: Trained, other: Trained) -> None:
    """Check that every loss, every bucket of every step and the final parameters are
    bit-identical."""
    import torch

    assert run.losses == other.losses
    assert same(run.gradients, other.gradients)
    assert run.parameters.keys() == other.parameters.keys()
    for name, value in run.parameters.items():
        assert torch.equal(value, other.parameters[name]), name
