"""Sums in blocks of few bits, also with the optimizer on the servers (which send differences),
compared bit for bit with a reference in torch."""

from __future__ import annotations

import math
from typing import Any

import byteps.torch as bps
import torch
from byteps.torch import ServerOptimizer, feedback_state, wire
from byteps.torch.step_machine import clip_scale
from byteps.torch.wire import WireType, feedback

from tests.few_bits import Rounding, Sums, moved
from tests.multiproc.programs import values
from tests.multiproc.programs.job import Job
from tests.multiproc.programs.server_optimizer import demand_same

FORMS = {
    "int8": wire.int8(),
    "int8 with feedback": wire.int8(feedback=True),
    "int4": wire.int4(feedback=False),
    "int4 with feedback": wire.int4(),
}
COUNTS = (1, 127, 129, 40_000, 600_003)


def sums(job: Job) -> None:
    """Sum every type of block, element type and length. Three rounds are made to test feedback."""
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
    """Check stochastic rounding, which depends on name, round, rank and element."""
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
    """Pull parts that begin and end inside blocks, another part on each rank. The rest of the
    tensor is unchanged."""
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
    """A NaN or infinity makes its own block NaN, and no other block. The next round is normal
    again."""
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
    """Losses are dropped on workers and servers, for each tensor when it is next sent."""
    bps.init()
    form, names = wire.int4(), ("a", "b")
    want = {name: Sums(form.name, job.size, feedback=True) for name in names}
    for round_ in range(6):
        if round_ in (2, 3):  # Losses are dropped twice, and "b" is not sent in between.
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
    """Load saved losses: the job then makes the same sums as the job that saved them. Losses can be
    saved again before they are used, and are dropped with others."""
    bps.init()
    form, count = wire.int4(), 600_003

    def sums(rounds: range) -> list[torch.Tensor]:
        results = []
        for round_ in rounds:
            given = _inputs(job, count, "saved", round_, "float32")[job.rank]
            bps.push_pull_inplace(given, average=False, name="saved", wire_dtype=form)
            results.append(given)
        return results

    first = sums(range(3))
    state = feedback_state.state_dict()
    with job.check("what is saved"):
        assert list(state) == ["saved"]
        assert ("of_servers" in state["saved"]) == (job.rank == 0)
        assert all(lost.abs().max() > 0 for lost in state["saved"].values())
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
    with job.check_raises(
        "another size", ValueError, "has 600004 values, but the tensor has 600003"
    ):
        sums(range(1))
    bps.shutdown()


def refused(job: Job) -> None:
    """Tensors that cannot be sent in few bits, and members that disagree."""
    bps.init()
    for label, given, form in (
        ("int64", torch.ones(4, dtype=torch.int64), "int8"),
        ("float64", torch.ones(4, dtype=torch.float64), "int4"),
    ):
        with job.check_raises(label, ValueError, f"{label} cannot be sent as {form}"):
            bps.push_pull_inplace(given, name="refused", wire_dtype=form)
    with job.check_raises("no such form", ValueError, "wire_dtype is int3; .*'int8', 'int4'"):
        bps.push_pull_inplace(torch.ones(4), name="refused", wire_dtype="int3")
    wire_type = wire.int8(feedback=job.rank == 1)
    with job.check_raises("members that disagree", bps.BytePSError, "with feedback"):
        bps.push_pull_inplace(torch.ones(4096), name="mixed", wire_dtype=wire_type)
    bps.shutdown()


def _inputs(job: Job, count: int, name: str, round_: int, dtype: str) -> list[torch.Tensor]:
    return [values.random_input(count, rank, name, round_, dtype) for rank in range(job.size)]


# Gradients in blocks of few bits with the optimizer on the servers, which send differences.


SHAPES = ((70, 65), (65,), (3, 200), (40, 33))
"""All but the second parameter travel in few bits, in one tensor."""
RATE = 0.25
"""A power of two: its product with a gradient is exact."""
SERVER_FORMS = {
    "int8": wire.int8(),
    "int8 with feedback": wire.int8(feedback=True),
    "int4": wire.int4(),
}
STEPS = 7
CLIPPED, SPOILT = (2, 5), 3


def gradient(rank: int, step: int, kind: int, count: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * rank + 10 * step + kind)
    return torch.randn(count, generator=random) * (1.0 if step in CLIPPED else 1e-3)


class Reference:
    """Repeats what servers and workers compute, on parameters laid end to end: `master` is the
    servers' copy, `held` the workers'."""

    def __init__(self, form: WireType | None, ranks: int, held: torch.Tensor) -> None:
        self._up = (
            None
            if form is None
            else [Rounding(form.name, feedback=form.feedback) for _ in range(ranks)]
        )
        self.held = held
        self.master = held.float()

    def forget(self) -> None:
        for rounding in self._up or ():
            rounding.forget()

    def total(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return the mean of these gradients, computed like the servers."""
        rounded = gradients
        if self._up is not None:
            rounded = [up(gradient) for up, gradient in zip(self._up, gradients, strict=True)]
        total = rounded[0].double() if self._up is None else rounded[0].clone()
        for value in rounded[1:]:
            total = total + value
        if self._up is not None:
            return total / len(rounded)
        # Sums of half types, or of fp32 in fp64, are rounded once.
        wide = total.float() if self.held.dtype != torch.float32 else total
        return (wide / len(rounded)).to(self.held.dtype).float()

    def step(self, mean: torch.Tensor, scale: float) -> None:
        self.master = self.master - RATE * (mean * torch.tensor(scale, dtype=torch.float32))
        if self._up is None:
            self.held = self.master.to(self.held.dtype)
        else:
            self.held = moved(self.held, self.master)


class Run:
    """A ServerOptimizer, with two references to compare it with: for parameters in few bits, and
    for the others."""

    def __init__(
        self, job: Job, form: WireType, dtype: torch.dtype, name: str, **options: Any
    ) -> None:
        self.job, self.dtype = job, dtype
        torch.manual_seed(3)
        self.parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype) * 3) for shape in SHAPES]
        self.served = ServerOptimizer(
            torch.optim.SGD(self.parameters, lr=RATE),
            name=name,
            wire_dtype=form,
            keep_bytes=1024,
            **options,
        )
        few = torch.cat([p.detach().flatten() for p in self.parameters if p.dim() > 1])
        self.references = [
            Reference(form, job.size, few.clone()),
            Reference(None, job.size, self.parameters[1].detach().clone()),
        ]

    @property
    def _kinds(self) -> list[list[torch.nn.Parameter]]:
        return [[p for p in self.parameters if p.dim() > 1], [self.parameters[1]]]

    def step(self, step: int) -> None:
        self.served.zero_grad()
        means = []
        for kind, (of_kind, reference) in enumerate(zip(self._kinds, self.references, strict=True)):
            count = sum(p.numel() for p in of_kind)
            all_ = [
                gradient(rank, step, kind, count).to(self.dtype) for rank in range(self.job.size)
            ]
            if step == SPOILT and self.served.max_norm is not None:
                all_[-1][count // 2] = math.nan
            own = all_[self.job.rank].split([p.numel() for p in of_kind])
            for parameter, part in zip(of_kind, own, strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(part.view(parameter.shape))
            means.append(reference.total([gradient.float() for gradient in all_]))
        self.served.step()
        scale = 1.0
        if self.served.max_norm is not None:
            norm = self.served.last_norm
            assert norm is not None
            wanted = math.sqrt(sum(float(mean.double().square().sum()) for mean in means))
            assert norm == wanted or math.isclose(norm, wanted, rel_tol=1e-9) or step == SPOILT
            assert math.isfinite(norm) == (step != SPOILT)
            scale = clip_scale(norm, self.served.max_norm)
            assert (scale < 1) == (step in CLIPPED)
            if step == SPOILT:
                for reference in self.references:
                    reference.forget()
                return
        for mean, reference in zip(means, self.references, strict=True):
            reference.step(mean, scale)

    def demand_equal(self) -> None:
        for of_kind, reference in zip(self._kinds, self.references, strict=True):
            own = torch.cat([p.detach().flatten() for p in of_kind])
            assert own.dtype == reference.held.dtype
            assert torch.equal(own, reference.held)

    def demand_equal_state(self) -> None:
        saved = self.served.state_dict()["state"]
        few = [index for index, p in enumerate(self.parameters) if p.dim() > 1]
        for name, wanted in (
            ("master_param", self.references[0].master),
            ("worker_param", self.references[0].held.float()),
        ):
            assert torch.equal(torch.cat([saved[i][name].flatten() for i in few]), wanted), name
        assert "worker_param" not in saved[1]


def steps(job: Job) -> None:
    """Make steps of every kind: at once; speculative, then kept, repeated or dropped; and late."""
    bps.init()
    for label, form in SERVER_FORMS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for how, options in (
                ("at once", {}),
                ("speculate", {"max_norm": 8.0}),
                ("wait", {"max_norm": 8.0, "clip": "wait"}),
            ):
                name = f"{label} {str(dtype).removeprefix('torch.')} {how}"
                run = Run(job, form, dtype, name, **options)
                for step in range(STEPS):
                    with job.check(f"{name}: step {step}"):
                        run.step(step)
                        run.demand_equal()
                with job.check(f"{name}: state"):
                    run.demand_equal_state()
                if how == "speculate":
                    with job.check(f"{name}: counts"):
                        assert run.served.redone_steps == len(CLIPPED)
                        assert run.served.skipped_steps == 1
                with job.check(f"{name}: goes on"):
                    _goes_on(job, run, form, dtype, name, options)
                demand_same(job, name, run.parameters)
    bps.shutdown()


def _goes_on(
    job: Job, run: Run, form: WireType, dtype: torch.dtype, name: str, options: dict[str, Any]
) -> None:
    """Load a saved state: the job then makes the same steps as the job that saved it, once both
    drop their losses."""
    saved = run.served.state_dict()
    again = Run(job, form, dtype, f"{name} again", **options)
    with torch.no_grad():
        for parameter, other in zip(again.parameters, run.parameters, strict=True):
            parameter.copy_(other)
    again.served.load_state_dict(saved)
    feedback.drop()
    for own_reference, others in zip(run.references, again.references, strict=True):
        own_reference.forget()
        others.master, others.held = own_reference.master.clone(), own_reference.held.clone()
    for each in (run, again):
        each.step(STEPS)
        each.demand_equal()
    for parameter, other in zip(again.parameters, run.parameters, strict=True):
        assert torch.equal(parameter, other)


def refused_by_servers(job: Job) -> None:
    """Try types whose parameters servers cannot send as differences: they are refused."""
    bps.init()
    for form in ("bf16", wire.of(torch.float16)):
        refused_parameters = [torch.nn.Parameter(torch.ones(3, 3))]
        with job.check_raises(str(form), ValueError, "give 'int8' or 'int4'"):
            ServerOptimizer(
                torch.optim.SGD(refused_parameters, lr=1.0), name="refused", wire_dtype=form
            )
    bps.shutdown()
