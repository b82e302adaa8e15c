"""Verdicts of the parity harness on fictitious runs, with one error at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from tests.layouts.gpt.compare import compare
from tests.layouts.gpt.layout import RankSeen, Step, Sum
from tests.layouts.gpt.rows import STEPS, Layout

Run = list[RankSeen]


def made_up(
    ranks: int,
    dtype: torch.dtype,
    *,
    byteps: bool,
    sharded: bool = False,
    wire_size: int | None = None,
) -> Run:
    """Return a made-up run of one group and one bucket, whose sums are rounded once."""
    steps: list[list[Step]] = [[] for _ in range(ranks)]
    members = tuple(range(ranks))
    for number in range(STEPS):
        index = torch.arange(8 * ranks)
        parts = [torch.sin(index + 10.0 * number + 100.0 * r).to(dtype) for r in members]
        total = torch.stack([part.double() for part in parts]).sum(0).to(dtype)
        for rank in members:
            begin, end = (8 * rank, 8 * rank + 8) if sharded else (0, 8 * ranks)
            bucket = Sum(
                members=members,
                local=parts[rank],
                result=total[begin:end].clone(),
                offset=begin,
                places={"p": (0, 8 * ranks)},
            )
            loss = 5.0 - number if rank == 0 else None
            steps[rank].append(Step(sums={"chunk0/bucket": bucket}, loss=loss, grad_norm=1.0))
    names = ["bucket"] * STEPS if byteps else []
    pushed = 8 * ranks * (wire_size or dtype.itemsize) * STEPS if byteps else 0
    return [
        RankSeen(
            steps=of_step,
            parameters={"p": torch.ones(3)},
            names=names,
            byteps_imported=byteps,
            pushed_bytes=pushed,
            pulled_bytes=pushed // ranks if sharded else pushed,
        )
        for of_step in steps
    ]


def misses(change: Callable[[Run], object], ranks: int, dtype: torch.dtype, sharded: bool) -> str:
    ours = made_up(ranks, dtype, byteps=True, sharded=sharded)
    theirs = copy.deepcopy(made_up(ranks, dtype, byteps=False, sharded=sharded))
    change(ours)
    layout = Layout(name="x", ranks=ranks, dtype="fp32" if dtype is torch.float32 else "bf16-wire")
    return "; ".join(compare(layout, ours, theirs).misses)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_runs_compare_as_equal(ranks: int, dtype: torch.dtype, sharded: bool) -> None:
    assert misses(lambda run: None, ranks, dtype, sharded) == ""


def result(run: Run, rank: int = 1, step: int = 2) -> torch.Tensor:
    return run[rank].steps[step].sums["chunk0/bucket"].result


def one_place_off(run: Run) -> None:
    value = result(run)
    value[3] = torch.nextafter(value[3], torch.tensor(9.0, dtype=value.dtype))


@pytest.mark.parametrize("sharded", [False, True])
def test_one_place_of_one_element_of_two_values(sharded: bool) -> None:
    said = misses(one_place_off, 2, torch.float32, sharded)
    where = "step 3, rank 1, chunk0/bucket (1 in all)"
    assert f"BytePS: not the rounded sum of two values: {where}" in said
    assert f"bits differ: {where}" in said


def test_one_element_of_one_member() -> None:
    said = misses(one_place_off, 4, torch.float32, False)
    assert said == "BytePS: members got different sums: step 3, rank 1, chunk0/bucket (1 in all)"


CHANGES: dict[str, tuple[Callable[[Run], object], str]] = {
    "error": (lambda run: result(run).mul_(1.01), "bfloat16: error"),
    "nan": (lambda run: result(run).fill_(float("nan")), "bfloat16: error nan"),
    "shard of another": (lambda run: result(run).copy_(result(run, rank=2)), "bfloat16: error"),
    "last step's": (lambda run: result(run).copy_(result(run, step=1)), "bfloat16: error"),
    "no push-pulls": (lambda run: run[1].names.clear(), "0 flat push-pulls for 4 sums"),
    "more pushed": (
        lambda run: setattr(run[2], "pushed_bytes", 300),
        "host 2 pushed 300 bytes, not 256",
    ),
    "more pulled": (lambda run: setattr(run[2], "pulled_bytes", 68), "host 2 pulled 68 bytes"),
    "fewer steps": (lambda run: run[1].steps.pop(), "rank 1: 3 and 4 steps"),
    "no bucket": (lambda run: run[0].steps[0].sums.clear(), "rank 0, step 1: other parameters"),
    "other bucket": (
        lambda run: (
            run[0].steps[0].sums.update({"chunk0/x": run[0].steps[0].sums.pop("chunk0/bucket")})
        ),
        "rank 0, step 1: other buckets",
    ),
    "first loss": (lambda run: setattr(run[0].steps[0], "loss", 5.1), "the first losses differ"),
    "late loss": (lambda run: setattr(run[0].steps[3], "loss", 2.1), "the losses differ by 0.05"),
    "loss nan": (
        lambda run: setattr(run[0].steps[1], "loss", float("nan")),
        "the losses differ by nan",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_difference_of_runs_is_found(name: str) -> None:
    change, text = CHANGES[name]
    assert text in misses(change, 4, torch.bfloat16, True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sent_as_bf16(ranks: int) -> None:
    """bf16 results are compared with the values sent, not with those before rounding."""
    layout = Layout(name="x", ranks=ranks, wire="bf16")
    theirs = made_up(ranks, torch.float32, byteps=False)

    def misses_of(*, rounded_parts: bool, rounded_sum: bool) -> str:
        ours = made_up(ranks, torch.float32, byteps=True, wire_size=2)
        for step in range(STEPS):
            sums = [rank.steps[step].sums["chunk0/bucket"] for rank in ours]
            parts = [s.local.bfloat16() if rounded_parts else s.local for s in sums]
            total = torch.stack([part.double() for part in parts]).sum(0)
            for total_of in sums:
                total_of.result = total.to(torch.bfloat16 if rounded_sum else torch.float32).float()
        return "; ".join(compare(layout, ours, theirs).misses)

    assert misses_of(rounded_parts=True, rounded_sum=True) == ""
    if ranks == 2:
        said = "not the rounded sum of two values"
        assert said in misses_of(rounded_parts=True, rounded_sum=False)
        assert said in misses_of(rounded_parts=False, rounded_sum=True)


def node_first(run: Run, names: list[str]) -> None:
    """Change the run to two hosts of two ranks: each rank pushes half of the bytes."""
    for seen in run:
        seen.names = names * STEPS
        seen.pushed_bytes //= 2
        seen.pulled_bytes //= 2


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["b/part0of2/piece0", "b/part0of2/piece1"], ""),
        (["bucket"], "4 flat push-pulls for 0 sums"),
        (["b/part0of2/piece1"], "0 node-first push-pulls for 4 sums"),
    ],
)
def test_hosts_that_sum_first(names: list[str], said: str) -> None:
    layout = Layout(name="x", ranks=4, per_host=2, route="node-first")
    ours = made_up(4, torch.float32, byteps=True)
    node_first(ours, names)
    misses = compare(layout, ours, made_up(4, torch.float32, byteps=False)).misses
    assert (said in "; ".join(misses)) if said else misses == []


def test_parameters_of_two_members() -> None:
    said = misses(lambda run: run[1].parameters["p"].add_(1), 2, torch.float32, False)
    assert said == "bits differ: rank 1, parameter p (1 in all)"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, ""),
        ("names", "rank 1: no push-pulls"),
        ("parameters", "bits differ: rank 1, parameter p (1 in all)"),
    ],
)
def test_steps_whose_sums_are_not_seen(change: str | None, said: str) -> None:
    runs = [made_up(2, torch.float32, byteps=byteps) for byteps in (True, False)]
    for rank in (rank for run in runs for rank in run):
        for step in rank.steps:
            step.sums.clear()
    if change == "names":
        runs[0][1].names = []
    if change == "parameters":
        runs[0][1].parameters["p"] = torch.ones(3) + 1e-6
    report = compare(Layout(name="x", ranks=2, graphed=True), *runs)
    assert "; ".join(report.misses) == said
