"""The optimizer on the servers, compared with torch's on the summed gradients.

The argument ``device`` is "cpu" or "cuda".
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import byteps.torch as bps
import torch
from byteps.torch import ServerOptimizer, operations, wire
from byteps.torch.server_tensor import ServerTensor, Step, rule_of

from tests.multiproc.programs.devices import device_of
from tests.multiproc.programs.job import Job

SHAPES = ((33, 65), (65,), (40, 33), (1,))
STEPS = 5
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8},
    "sgd": {"lr": 0.01, "momentum": 0.9, "nesterov": True},
}
TORCHS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
# A few fp32 steps, which may be rounded like torch's or with one fused operation more or less.
CLOSE: dict[str, Any] = {"rtol": 2e-6, "atol": 2e-7}


def parameters(
    seed: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> list[torch.nn.Parameter]:
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype).to(device)) for shape in SHAPES]


def gradient(rank: int, step: int, index: int) -> torch.Tensor:
    """Return multiples of 1/64 that bf16 can hold, different for each rank, step, parameter and
    element."""
    count = math.prod(SHAPES[index])
    numbers = torch.arange(count) * 37 + rank * 11 + step * 5 + index * 3
    return ((numbers % 251 - 125) / 64.0).view(SHAPES[index])


def mean_gradient(job: Job, step: int, index: int, dtype: torch.dtype) -> torch.Tensor:
    total = sum(gradient(rank, step, index) for rank in range(job.size))
    assert isinstance(total, torch.Tensor)
    return (total / job.size).to(dtype).float()


def groups_of(trained: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Return two groups: weights, which decay, and biases, which do not and have half the rate."""
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1, "scale": 1.0},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "scale": 0.5},
    ]


def set_rates(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * group["scale"] / (1 + step)


def set_gradients(job: Job, trained: list[torch.nn.Parameter], step: int) -> None:
    for index, parameter in enumerate(trained):
        assert parameter.grad is not None
        parameter.grad.copy_(gradient(job.rank, step, index))


def fingerprint(trained: list[torch.nn.Parameter]) -> str:
    digest = hashlib.sha256()
    for parameter in trained:
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def demand_same(job: Job, name: str, trained: list[torch.nn.Parameter]) -> None:
    """Record the bits; the test checks that they are equal on every rank."""
    job.note(f"bits.{name}", fingerprint(trained))


class Pair:
    """A ServerOptimizer, and torch's result for the same sums in fp32."""

    def __init__(self, job: Job, kind: str, dtype: torch.dtype, name: str, **options: Any) -> None:
        self.job, self.dtype = job, dtype
        # The values differ by rank, and rank 0's are used.
        self.parameters = parameters(job.rank, dtype, device_of(job))
        self.served = ServerOptimizer(
            TORCHS[kind](groups_of(self.parameters), **OPTIONS[kind]),
            name=name,
            bucket_bytes=8192,  # The parameters fill several buckets.
            **options,
        )
        self.exact = [torch.nn.Parameter(p.detach().float()) for p in parameters(0, dtype)]
        self.torchs = TORCHS[kind](groups_of(self.exact), foreach=False, **OPTIONS[kind])

    def step(self, step: int, spoil: bool = False) -> None:
        """Make a step of both optimizers. `spoil`: whether a gradient of one rank is not finite."""
        self.served.zero_grad()
        for optimizer in (self.served, self.torchs):
            set_rates(optimizer, step)
        set_gradients(self.job, self.parameters, step)
        if spoil and self.job.rank == 1:
            spoilt = self.parameters[2].grad
            assert spoilt is not None
            spoilt[3, 5] = math.nan
        for index, parameter in enumerate(self.exact):
            parameter.grad = mean_gradient(self.job, step, index, self.dtype)
        if self.served.max_norm is not None:
            self.norm = torch.nn.utils.clip_grad_norm_(self.exact, self.served.max_norm)
        self.served.step()
        if not spoil:
            self.torchs.step()

    def demand_equal(self) -> None:
        for parameter, exact in zip(self.parameters, self.exact, strict=True):
            value = parameter.detach().cpu()
            if self.dtype == torch.float32:
                torch.testing.assert_close(value, exact.detach(), **CLOSE)
            else:  # Values may be rounded to the neighbouring number.
                torch.testing.assert_close(value.float(), exact.detach(), rtol=4e-3, atol=1e-6)

    def demand_equal_state(self) -> None:
        """Compare the state on the servers: fp32 for any parameter type."""
        saved = self.served.state_dict()["state"]
        order = [p for group in self.torchs.param_groups for p in group["params"]]
        for index, exact in enumerate(order):
            for name, values in self.torchs.state[exact].items():
                if values is not None:
                    torch.testing.assert_close(saved[index][name], values.float(), **CLOSE)
            if self.dtype != torch.float32:
                torch.testing.assert_close(saved[index]["master_param"], exact.detach(), **CLOSE)


def updates(job: Job) -> None:
    """Steps of AdamW and SGD, two groups, a schedule, and resuming from a saved state."""
    bps.init()
    for kind in TORCHS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            name = f"{kind} {str(dtype).removeprefix('torch.')}"
            pair = Pair(job, kind, dtype, name)
            with job.check(f"{name}: the parameters of rank 0"):
                for parameter, other in zip(pair.parameters, parameters(0, dtype), strict=True):
                    assert torch.equal(parameter.cpu(), other)
            for step in range(STEPS):
                with job.check(f"{name}: step {step}"):
                    pair.step(step)
                    pair.demand_equal()
            with job.check(f"{name}: state"):
                pair.demand_equal_state()
            demand_same(job, name, pair.parameters)
            with job.check(f"{name}: goes on"):
                goes_on(job, kind, dtype, name, pair)


def goes_on(job: Job, kind: str, dtype: torch.dtype, name: str, pair: Pair) -> None:
    """Resume from a saved state: on the servers with the same bits, and in torch's optimizer."""
    saved = pair.served.state_dict()
    again = Pair(job, kind, dtype, f"{name} again")
    with torch.no_grad():
        for parameter, other in zip(again.parameters, pair.parameters, strict=True):
            parameter.copy_(other)
    again.served.load_state_dict(saved)
    for each in (pair, again):
        each.step(STEPS)
    for parameter, other in zip(again.parameters, pair.parameters, strict=True):
        assert torch.equal(parameter, other)
    if dtype == torch.float32:  # torch keeps no fp32 copy of other types.
        alone = [torch.nn.Parameter(p.detach().clone()) for p in pair.exact]
        optimizer = TORCHS[kind](groups_of(alone), **OPTIONS[kind])
        optimizer.load_state_dict(pair.served.state_dict())
        assert optimizer.state[alone[0]], "torch did not take the state"


def clipped(job: Job) -> None:
    """Steps with and without clipping, and a step with infinite gradients."""
    bps.init()
    for max_norm in (1.0, 1e6):
        pair = Pair(job, "adamw", torch.float32, f"clip {max_norm}", max_norm=max_norm)
        for step in range(STEPS):
            spoil = step == 2
            before = fingerprint(pair.parameters)
            with job.check(f"clip {max_norm}: step {step}"):
                pair.step(step, spoil)
                norm = pair.served.last_norm
                assert norm is not None
                if spoil:
                    assert math.isnan(norm) and fingerprint(pair.parameters) == before
                else:
                    assert math.isclose(norm, float(pair.norm), rel_tol=1e-5), pair.norm
                    assert (norm > max_norm) == (max_norm == 1.0)
                pair.demand_equal()
        with job.check(f"clip {max_norm}: counts"):
            assert (pair.served.steps, pair.served.skipped_steps) == (STEPS - 1, 1)
            pair.demand_equal_state()
        demand_same(job, f"clip {max_norm}", pair.parameters)
    with job.check_raises("clip", ValueError, "'speculate' or 'wait', not 'clip'"):
        ServerOptimizer(torch.optim.AdamW(parameters(0, torch.float32)), clip="clip")
    counted(job)


# Predicate of clipped steps, and the numbers of speculative and repeated steps.
PATTERNS: dict[str, tuple[Callable[[int], bool], tuple[int, int]]] = {
    # Two clipped steps in a row turn speculation off.
    "every step": (lambda step: True, (2, 2)),
    "every other step": (lambda step: step % 2 == 0, (8, 3)),
    "never": (lambda step: False, (8, 0)),
    "first": (lambda step: step < 4, (5, 2)),
}
SPOILED = 2


def speculates(job: Job) -> None:
    """Make speculative steps, with every kind of clipping, and with a gradient that is not finite:
    parameters and state have the bits of other steps."""
    bps.init()
    for name, (clips, counts) in PATTERNS.items():
        for kind, dtype in (("adamw", torch.bfloat16), ("sgd", torch.float32)):
            pairs = [
                Pair(job, kind, dtype, f"{name} {kind} {clip}", max_norm=1.0, clip=clip)
                for clip in ("speculate", "wait")
            ]
            for step in range(8):
                for pair in pairs:
                    pair.served.max_norm = 1.0 if clips(step) else 1e6
                    pair.step(step, step == SPOILED)
                with job.check(f"{name}, {kind}: step {step}"):
                    tried, waited = (fingerprint(pair.parameters) for pair in pairs)
                    assert tried == waited
                if step % 3 == 0:
                    with job.check(f"{name}, {kind}: state after step {step}"):
                        demand_equal_states(pairs)
            with job.check(f"{name}, {kind}: what was tried"):
                served = pairs[0].served
                assert (served.tried_steps, served.redone_steps) == counts, counts
                assert pairs[1].served.tried_steps == 0
                assert served.skipped_steps == 1
                gradients = [p.grad for p in pairs[0].parameters if p.grad is not None]
                assert len(gradients) == len(pairs[0].parameters)
                assert all(gradient.count_nonzero() == 0 for gradient in gradients)
            demand_same(job, f"{name} {kind}", pairs[0].parameters)


def demand_equal_states(pairs: list[Pair]) -> None:
    tried, waited = (pair.served.state_dict()["state"] for pair in pairs)
    for index, state_of in tried.items():
        for slot, values in state_of.items():
            assert torch.equal(values, waited[index][slot]), (index, slot)


def counted(job: Job) -> None:
    """Check the norm: elements that do not count are left out, unless they are not finite."""
    served = ServerTensor(
        bps.TensorDeclaration(name="counted", dtype=torch.float32, numel=3000, average=False),
        rule_of(torch.optim.SGD(parameters(0, torch.float32), lr=0.1)),
        [(1000, 0, True), (2500, 0, False), (3000, 0, True)],
        in_order=True,
        counts_zeros=True,
    )
    if job.rank == 0:
        served.load(0, torch.zeros(3000))
    values = torch.arange(3000.0) / 4096
    for spoil in (False, True):
        gradients = values + job.rank
        gradients[2000] = math.inf if spoil else 0.0
        gradients[0] = job.rank - sum(range(job.size)) / job.size
        served.wait(served.push_norm(gradients))
        total = job.size * values.double() + sum(range(job.size))
        total[0] = 0
        total[1000:2500] = 0
        with job.check(f"zeros, spoiled: {spoil}"):
            # The first sum is 0, and so are sums that do not count.
            assert served.zeros == 1, served.zeros
        with job.check(f"squares, spoiled: {spoil}"):
            sum_of_squares = sum(served.squares)
            wanted = math.nan if spoil else total.square().sum().item()
            assert math.isnan(sum_of_squares) if spoil else math.isclose(sum_of_squares, wanted), (
                sum_of_squares,
                wanted,
            )
        served.wait(served.step(gradients, Step(1, 1.0, True, [(0.1, 0.0)])))


def keeps_memory(job: Job) -> None:
    """Operations in flight keep their tensors alive."""
    bps.init()
    count = 200_000
    served = ServerTensor(
        bps.TensorDeclaration(name="memory", dtype=torch.float32, numel=count),
        rule_of(torch.optim.SGD(parameters(0, torch.float32), lr=0.1)),
        [(count, 0, True)],
    )
    if job.rank == 0:
        served.load(0, torch.zeros(count))
    gradients, landing = torch.full((count,), job.rank + 1.0), torch.empty(count)
    left = [weakref.ref(gradients), weakref.ref(landing)]
    handle = served.push_step(gradients, landing, Step(1, 1.0, False, [(0.5, 0.0)]))
    del gradients, landing
    with job.check("while it is under way"):
        assert all(reference() is not None for reference in left)
    arrived = left[1]()
    served.wait(handle)
    with job.check("what came down"):
        mean = (job.size + 1) / 2
        assert arrived is not None and arrived.eq(-0.5 * mean).all()
    del arrived
    with job.check("afterwards"):
        assert all(reference() is None for reference in left)


def interrupted(job: Job) -> None:
    """Interrupt a step outside BytePS: the job must resume from a checkpoint, and does."""
    bps.init()
    for clip in ("speculate", "wait"):
        pair = Pair(job, "adamw", torch.float32, clip, max_norm=1e6, clip=clip)
        pair.step(0)
        saved = pair.served.state_dict()
        bucket = pair.served._buckets[-1]
        with (
            job.check_raises(f"{clip}: an interrupt", OSError, "by hand"),
            mock.patch.object(bucket, "wait", side_effect=OSError("by hand")),
        ):
            pair.step(1)
        for name, call in (("step", pair.served.step), ("state", pair.served.state_dict)):
            with job.check_raises(f"{clip}: {name}", bps.BytePSError, "earlier step .*by hand"):
                call()
        pair.served.load_state_dict(saved)
        with job.check(f"{clip}: from a checkpoint"):
            for step in (1, 2):
                pair.step(step)
                pair.demand_equal()
            pair.demand_equal_state()


def loads(job: Job) -> None:
    """Every rank refuses an unsuitable state, and nothing changes."""
    bps.init()
    pair = Pair(job, "adamw", torch.float32, "loads")
    pair.step(0)
    shape, option = (pair.served.state_dict() for _ in range(2))
    shape["state"][1]["exp_avg"] = torch.zeros(3, 4)
    shape["param_groups"][0]["lr"] = 7.0
    option["param_groups"][1]["betas"] = (0.5, 0.5)
    message = r"exp_avg of parameter 1 has the shape \(3, 4\), the parameter"
    with job.check_raises("a shape", ValueError, message):
        pair.served.load_state_dict(shape)
    with job.check_raises("an option", ValueError, "changed in more than"):
        pair.served.load_state_dict(option)
    with job.check("groups"):
        assert pair.served.param_groups[0]["lr"] == 0.01
    for step in (1, 2):
        with job.check(f"step {step}"):
            pair.step(step)
            pair.demand_equal()


def _made(job: Job, name: str = "", group: list[int] | None = None) -> ServerOptimizer:
    """Make an optimizer over a parameter of ones, with the default name unless given."""
    torchs = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1)
    if name:
        served = ServerOptimizer(torchs, name=name, group=group)
    else:
        served = ServerOptimizer(torchs, group=group)
    served.zero_grad()
    return served


def names(job: Job) -> None:
    """Make two optimizers of the same name: they are refused, as they would share one state."""
    bps.init()
    first = _made(job)
    taken = r"another ServerOptimizer named 'optimizer' is in use on {} of .* {} ranks.*name=\.\.\."
    with job.check_raises("the same name", ValueError, taken.format(3, 3)):
        _made(job)
    if job.rank < 2:
        with job.check_raises("in a part of the group", ValueError, taken.format(2, 2)):
            _made(job, group=[0, 1])
    with job.check("the first one goes on"):
        parameter = first.param_groups[0]["params"][0]
        for step in range(1, 3):
            first.zero_grad()
            parameter.grad.fill_(float(job.rank + step))
            before = parameter.detach().clone()
            first.step()
            assert torch.allclose(before - parameter, torch.full((4,), 0.1 * (1 + step)))
    second = _made(job, name="second")
    with job.check("another name"):
        second.step()
    # Only rank 1 keeps a reference. The other ranks have collected their optimizer.
    named = [second] if job.rank == 1 else []
    del second
    with job.check_raises("alive on one rank", ValueError, "in use on 1 of .* 3 ranks"):
        _made(job, name="second")
    for served in named:
        served.close()
    with job.check("closed there"):
        _made(job, name="second").step()
    first.close()
    for name, call in (("step", first.step), ("state", first.state_dict)):
        with job.check_raises(f"{name} when closed", bps.BytePSError, "'optimizer' was closed"):
            call()
    # Groups without a common rank may use the same name.
    with job.check("groups apart"):
        _made(job, name="apart", group=[0, 1] if job.rank < 2 else [2]).step()
    other_shapes(job)
    third = _made(job, name="third")
    bps.suspend()
    bps.resume(job.size, job.args["servers"], job.rank)
    with job.check("in the next job"):
        _made(job, name="third").step()
        third.close()


def other_shapes(job: Job) -> None:
    """Release a name, and use it for parameters of another shape: no state of the first parameters
    remains on the ranks. Rank 0 releases it by close(), the others by garbage collection."""
    for life, rows in enumerate((256, 300, 256)):
        with job.check(f"life {life}, of {rows} rows"):
            torchs = torch.optim.SGD([torch.nn.Parameter(torch.ones(rows, 256))], lr=0.1)
            served = ServerOptimizer(torchs, name="shapes", wire_dtype=wire.int8(feedback=True))
            served.zero_grad()
            parameter = served.param_groups[0]["params"][0]
            parameter.grad.fill_(job.rank + 1.0)
            served.step()
            mean = sum(rank + 1.0 for rank in range(job.size)) / job.size
            assert torch.allclose(parameter, torch.full_like(parameter, 1 - 0.1 * mean), rtol=1e-3)
            if job.rank == 0:
                served.close()
            del served
            gc.collect()
            assert not [name for name in wire.feedback.names() if name.startswith("shapes")]
            assert not [name for name in operations._known if name.startswith("shapes")]


def disagree(job: Job) -> None:
    """Members that ask for different steps get an error; then the optimizer requires a
    checkpoint."""
    bps.init()
    for max_norm in (None, 1.0):
        trained = parameters(0, torch.float32)
        served = ServerOptimizer(
            torch.optim.SGD(trained, lr=0.5 + job.rank), name=f"rates {max_norm}", max_norm=max_norm
        )
        served.zero_grad()
        said = r"disagree on a step of .*worker [01] asks for step 1 with learning rates [01]\.5"
        try:
            served.step()
        except bps.BytePSError as error:
            job.note(f"disagree.{max_norm}", str(error))
        # If norms are needed, the optimizer that asks first is served.
        if max_norm is None:
            with job.check_raises("afterwards", bps.BytePSError, f"earlier step.*{said}"):
                served.step()


def refused(job: Job) -> None:
    """Unsupported options, and too little memory."""
    bps.init()
    trained = parameters(0, torch.float32)
    unknown: tuple[tuple[str, Any, dict[str, Any], str], ...] = (
        ("another optimizer", torch.optim.Adam, {}, "AdamW and SGD do, not as Adam"),
        ("an option", torch.optim.AdamW, {"amsgrad": True}, "amsgrad=True"),
    )
    for name, kind, options, pattern in unknown:
        with job.check_raises(name, ValueError, pattern):
            ServerOptimizer(kind(trained, lr=0.1, **options))
    with job.check_raises("a type", ValueError, "number 0 .*float64"):
        ServerOptimizer(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3).double())]))
    pattern = r"too little memory for the optimizer state of 'big/0': it needs \d+ bytes"
    with job.check_raises("memory", bps.BytePSError, pattern + ".*BYTEPS_SERVER_STATE_BYTES"):
        ServerOptimizer(torch.optim.AdamW(trained), name="big")
    with job.check("what fits"):
        assert os.environ["BYTEPS_SERVER_STATE_BYTES"] == "40000"
        served = ServerOptimizer(torch.optim.SGD(trained, lr=0.1), name="small")
        with job.check_raises("a group that changed", ValueError, "changed in more than"):
            served.param_groups[0]["momentum"] = 0.5
            served.step()
