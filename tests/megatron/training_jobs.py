"""What the ranks of a training job saw, put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.layouts.gpt.layout import RankSeen
from tests.layouts.job import Job


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training run saw, at full precision: lists over steps."""

    job: Job
    losses: list[float]
    """Of rank 0: averages over all ranks."""
    gradients: list[list[Any]]
    """Of rank 0: the summed buckets of each step, or the shards of them that it owns."""
    local_gradients: list[list[list[Any]]]
    """Of every rank: the same buckets, scaled, before they were summed."""
    parameters: dict[str, Any]
    """Of rank 0, at the end."""
    names: list[str]
    """Of the BytePS operations that rank 0 started, in that order; empty without."""

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
                [[total.local for total in step.sums.values()] for step in one.steps]
                for one in seen
            ],
            parameters=first.parameters,
            names=first.names,
        )


def _losses(seen: RankSeen) -> list[float]:
    return [step.loss for step in seen.steps if step.loss is not None]


def _results(seen: RankSeen) -> list[list[Any]]:
    return [[total.result for total in step.sums.values()] for step in seen.steps]


def _holds_all(seen: RankSeen) -> bool:
    """Whether the rank got whole sums, not the shards of the distributed optimizer."""
    return all(
        total.result.shape == total.local.shape
        for step in seen.steps
        for total in step.sums.values()
    )


def same(one: list[list[Any]], other: list[list[Any]]) -> bool:
    """Whether two lists of buckets, step by step, are the same bits."""
    import torch

    if [len(step) for step in one] != [len(step) for step in other]:
        return False
    return all(
        a.dtype == b.dtype and torch.equal(a, b)
        for step, twin in zip(one, other, strict=True)
        for a, b in zip(step, twin, strict=True)
    )


def assert_same_run(one: Trained, other: Trained) -> None:
    """Every loss, every bucket of every step and the final parameters agree to the last bit."""
    import torch

    assert one.losses == other.losses
    assert same(one.gradients, other.gradients)
    assert one.parameters.keys() == other.parameters.keys()
    for name, value in one.parameters.items():
        assert torch.equal(value, other.parameters[name]), name
