"""Training through BytePS gives what training through all-reduce gives.

With two ranks a sum has one rounding in either backend: everything must agree to the last bit. With
three, the order of the additions may differ, and both are held against the exact sum.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.megatron.training_jobs import Trained, assert_same_run

Train = Callable[..., Trained]

BUCKETS = ("--overlap-grad-reduce", "--ddp-bucket-size", "5000")
ACCUMULATE = ("--global-batch-size", "12")

CASES = {
    "fp32": (),
    "fp32-overlap-buckets": BUCKETS,
    "fp32-accumulate-dropout": (*ACCUMULATE, "--hidden-dropout", "0.2"),
    "fp32-tight-clip": ("--clip-grad", "0.05"),
    "bf16": ("--bf16",),
    "bf16-wire-overlap-accumulate": ("--bf16", "--grad-reduce-in-bf16", *BUCKETS, *ACCUMULATE),
    "fp16-overlap": ("--fp16", "--initial-loss-scale", "1024", *BUCKETS),
    "per-token-loss": ("--calculate-per-token-loss", *ACCUMULATE),
}


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
def test_two_ranks_agree_to_the_last_bit(train: Train, arguments: tuple[str, ...]) -> None:
    through_byteps = train(*arguments, "--use-dpu-reduce")
    through_all_reduce = train(*arguments)
    assert_same_run(through_byteps, through_all_reduce)

    # The comparison is worth something: it trained, the ranks differ, and BytePS made the sums.
    assert len(through_byteps.losses) == 4
    assert through_byteps.losses[-1] < through_byteps.losses[0]
    first, second = (local[0] for local in through_byteps.local_gradients)
    assert not torch.equal(first[0], second[0])
    buckets = len(through_byteps.gradients[0])
    assert (buckets > 1) == ("--ddp-bucket-size" in arguments)
    assert len(through_byteps.names) == 4 * buckets
    assert len(set(through_byteps.names)) == buckets
    assert through_all_reduce.names == []


def test_average_in_collective(train: Train) -> None:
    """gloo cannot average, so it stands against a sum of halves, which is exact."""
    averaged = train("--use-dpu-reduce", "--ddp-average-in-collective", *BUCKETS)
    assert_same_run(averaged, train(*BUCKETS))


def test_average_in_collective_node_first(train: Train) -> None:
    """Divided by two inside the host and by two on the servers, which is exact."""
    node = ("--use-dpu-reduce", "--dpu-reduce-route", "node-first", *BUCKETS)
    averaged = train(*node, "--ddp-average-in-collective", ranks=4, per_host=2)
    assert_same_run(averaged, train(*node, ranks=4, per_host=2))
    assert all("/part" in name for name in averaged.names)


def test_three_ranks_are_within_rounding_of_the_exact_sum(train: Train) -> None:
    """Two additions in fp32 are off by no more than 2 u (|a| + |b| + |c|), to first order."""
    unit = 2.0**-24
    runs = [train("--use-dpu-reduce", ranks=3), train(ranks=3)]
    for run in runs:
        for step, sums in enumerate(run.gradients):
            for bucket, result in enumerate(sums):
                parts = [local[step][bucket].double() for local in run.local_gradients]
                exact = sum(parts)
                magnitude = sum(part.abs() for part in parts)
                error = (result.double() - exact).abs()
                assert bool((error <= 2.01 * unit * magnitude).all())
    ours, theirs = runs
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-4, atol=0.0)


def test_a_broken_sum_would_be_seen(train: Train) -> None:
    """The comparison fails for a reducer that is off by two units in the last place."""
    broken = train("--use-dpu-reduce", broken="last-places")
    with pytest.raises(AssertionError):
        assert_same_run(broken, train())


def test_one_rank_pushes_nothing(train: Train) -> None:
    alone = train("--use-dpu-reduce", ranks=1)
    assert alone.names == []
    assert_same_run(alone, train(ranks=1))
