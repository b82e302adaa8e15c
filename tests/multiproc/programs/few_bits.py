"""Sums in blocks of few bits against a reference in torch, to the bit."""

from __future__ import annotations

import byteps.torch as bps
import torch
from byteps.torch import feedback_state, wire
from byteps.torch.feedback import feedback

from tests.few_bits import Sums
from tests.multiproc.programs import values
from tests.multiproc.programs.job import Job

FORMS = {
    "int8": wire.int8(),
    "int8 with feedback": wire.int8(feedback=True),
    "int4": wire.int4(feedback=False),
    "int4 with feedback": wire.int4(),
}
COUNTS = (1, 127, 129, 40_000, 600_003)


def sums(job: Job) -> None:
    """Every form, type and length; three rounds, so that feedback shows."""
    bps.init()
    for label, form in FORMS.items():
        for dtype, counts in (("float32", COUNTS), ("bfloat16", (1001,)), ("float16", (1001,))):
            for count in counts:
                average = count % 2 == 1
                name = f"{label} {dtype} {count}"
                with job.check(name):
                    want = Sums(form.name, job.size, feedback=form.feedback)
                    for round_ in range(3):
                        inputs = _inputs(job, count, name, round_, dtype)
                        given = inputs[job.rank].clone()
                        bps.push_pull_inplace(given, average=average, name=name, wire_dtype=form)
                        assert torch.equal(given, want(inputs, average=average)), round_
    bps.shutdown()


def by_chance(job: Job) -> None:
    """Up or down, as the names, the rounds, the ranks and the places say."""
    bps.init()
    for label, form in FORMS.items():
        for dtype, count in (("float32", 129), ("float32", 70_001), ("bfloat16", 1001)):
            name = f"{label} {dtype} {count}"
            with job.check(name):
                want = Sums(form.name, job.size, feedback=form.feedback, chance=name)
                for round_ in range(3):
                    inputs = _inputs(job, count, name, round_, dtype)
                    given = inputs[job.rank].clone()
                    bps.push_pull_inplace(given, average=True, name=name, wire_dtype=form)
                    assert torch.equal(given, want(inputs, average=True)), round_
    bps.shutdown()


def parts(job: Job) -> None:
    """Each rank wants a part, which begins and ends inside blocks; the rest stays as it is."""
    bps.init()
    count = 80_001
    for label, form in FORMS.items():
        for begin, end in ((0, 1), (1, 127), (5, 70_003), (128, 256), (79_900, count), (7, 7)):
            name = f"{label} {begin}-{end}"
            with job.check(name):
                inputs = _inputs(job, count, name, 0, "float32")
                given = inputs[job.rank].clone()
                part = (min(begin + job.rank, end), end)
                handle = bps.push_pull_async_inplace(
                    given, average=False, name=name, pull=part, wire_dtype=form
                )
                bps.synchronize(handle)
                total = Sums(form.name, job.size, feedback=form.feedback)(inputs, average=False)
                want = inputs[job.rank].clone()
                want[slice(*part)] = total[slice(*part)]
                assert torch.equal(given, want)
    bps.shutdown()


def not_finite(job: Job) -> None:
    """A block with a NaN or an infinity is NaN, and no other; the next round is as ever."""
    bps.init()
    for label, form in FORMS.items():
        for bad in (float("nan"), float("inf"), float("-inf")):
            with job.check(f"{label} {bad}"):
                name = f"{label} {bad}"
                want = Sums(form.name, job.size, feedback=form.feedback)
                for round_ in range(2):
                    inputs = _inputs(job, 1000, name, round_, "float32")
                    if round_ == 0:
                        inputs[job.size - 1][300] = bad
                    given = inputs[job.rank].clone()
                    bps.push_pull_inplace(given, name=name, wire_dtype=form)
                    assert given[256:384].isnan().all() == (round_ == 0)
                    assert torch.equal(
                        given.nan_to_num(7), want(inputs, average=True).nan_to_num(7)
                    )
    bps.shutdown()


def forgotten(job: Job) -> None:
    """What was lost is dropped here and on the servers, for every tensor, when it is next sent."""
    bps.init()
    form, names = wire.int4(), ("a", "b")
    want = {name: Sums(form.name, job.size, feedback=True) for name in names}
    for round_ in range(6):
        if round_ in (2, 3):  # twice, and "b" is not sent in between
            feedback.drop()
            for sums in want.values():
                sums.forget()
        for name in names if round_ != 2 else names[:1]:
            with job.check(f"round {round_} of {name}"):
                inputs = _inputs(job, 600_003, name, round_, "float32")
                given = inputs[job.rank].clone()
                bps.push_pull_inplace(given, average=False, name=name, wire_dtype=form)
                assert torch.equal(given, want[name](inputs, average=False))
    bps.shutdown()


def saved(job: Job) -> None:
    """Who loads what was saved makes the sums of who goes on, here and on the servers; it is saved
    again before it is used, and dropped with what is not."""
    bps.init()
    form, count = wire.int4(), 600_003

    def sums(rounds: range) -> list[torch.Tensor]:
        found = []
        for round_ in rounds:
            given = _inputs(job, count, "saved", round_, "float32")[job.rank]
            bps.push_pull_inplace(given, average=False, name="saved", wire_dtype=form)
            found.append(given)
        return found

    first = sums(range(3))
    state = feedback_state.state_dict()
    with job.check("what is saved"):
        assert list(state) == ["saved"]
        assert ("of_servers" in state["saved"]) == (job.rank == 0)
        assert all(one.abs().max() > 0 for one in state["saved"].values())
    went_on = sums(range(3, 5))
    feedback_state.load_state_dict(state)
    with job.check("saved again"):
        again = feedback_state.state_dict()["saved"]
        assert again.keys() == state["saved"].keys()
        assert all(torch.equal(again[key], state["saved"][key]) for key in again)
    with job.check("loaded"):
        assert all(map(torch.equal, sums(range(3, 5)), went_on))
    feedback_state.load_state_dict({})
    with job.check("dropped"):
        assert feedback_state.state_dict() == {}
        assert all(map(torch.equal, sums(range(3)), first))
    feedback_state.load_state_dict({"saved": {"lost": torch.zeros(count + 1)}})
    with job.check_raises("another size", ValueError, "of 600004 values, the tensor of 600003"):
        sums(range(1))
    bps.shutdown()


def refused(job: Job) -> None:
    """What cannot be sent so, and members that disagree."""
    bps.init()
    for label, given, form in (
        ("int64", torch.ones(4, dtype=torch.int64), "int8"),
        ("float64", torch.ones(4, dtype=torch.float64), "int4"),
    ):
        with job.check_raises(label, ValueError, f"{label} cannot be sent as {form}"):
            bps.push_pull_inplace(given, name="refused", wire_dtype=form)
    with job.check_raises("no such form", ValueError, "wire_dtype is int3; .*'int8', 'int4'"):
        bps.push_pull_inplace(torch.ones(4), name="refused", wire_dtype="int3")
    if job.size > 1:
        mine = wire.int8(feedback=job.rank == 1)
        with job.check_raises("members that disagree", bps.BytePSError, "with feedback"):
            bps.push_pull_inplace(torch.ones(4096), name="mixed", wire_dtype=mine)
    bps.shutdown()


def _inputs(job: Job, count: int, name: str, round_: int, dtype: str) -> list[torch.Tensor]:
    return [values.random_input(count, rank, name, round_, dtype) for rank in range(job.size)]
