"""Programs that shard fully by FSDP2, with reduce-scatters through the servers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import byteps.torch as bps
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from byteps.torch import fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from tests.multiproc.programs.c10d_kit import (
    initialize,
    on_gpu,
    through_servers,
    whole_parameters,
)
from tests.multiproc.programs.job import Job

STEPS = 3
WIDTHS = (130, 259, 67, 130)
"""Number of rows, which no number of ranks divides. So shards are filled up."""


class Model(nn.Module):
    """Layers, the first of them frozen, that are computed in the order of their use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        pairs = itertools.pairwise(WIDTHS)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairs)
        self.frozen = nn.Linear(WIDTHS[-1], WIDTHS[0])
        self.frozen.requires_grad_(False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.frozen(values)
        for layer in self.layers:
            values = torch.tanh(layer(values))
        return values


def _shard(
    job: Job, through: Callable[[nn.Module], None], *, compiles: bool = False, **named: Any
) -> Model:
    model = Model().to("cuda" if on_gpu(job) else "cpu")
    for layer in (*model.layers, model.frozen):
        fully_shard(layer, **named)
    fully_shard(model, **named)
    through(model)
    if compiles:
        model.compile(backend="aot_eager")
    return model


def _train(
    job: Job, model: Any, steps: int = STEPS, *, accumulates: bool = False
) -> list[torch.Tensor]:
    """Train some steps, and return the parameters unsharded."""
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.5)
    torch.manual_seed(100 + job.rank)
    for _ in range(steps):
        optimizer.zero_grad()
        for last in (False, True) if accumulates else (True,):
            model.set_requires_gradient_sync(last)
            model(torch.randn(8, WIDTHS[0])).float().square().mean().backward()
        optimizer.step()
    return whole_parameters(model)


def _plain(model: nn.Module) -> None:
    """Leave FSDP2 as it is in torch."""


def _served(wire_dtype: str, gather_dtype: str = "none") -> Callable[[nn.Module], None]:
    def through(model: nn.Module) -> None:
        fsdp.apply(model, wire_dtype=wire_dtype, gather_dtype=gather_dtype)

    return through


_MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_SHORT = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

CASES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "mixed precision": {"mp_policy": _MIXED},
    "gradients in bf16": {"mp_policy": _SHORT},
    "kept after the forward pass": {"reshard_after_forward": False},
    "on the CPU between steps": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "accumulated": {"accumulates": True},
    "compiled": {"compiles": True},
    "resharded to fewer ranks": {"reshard_after_forward": 1},
}


def exact(job: Job) -> None:
    """Train on two hosts, with values in their own type: results have the bits of gloo or NCCL."""
    initialize(job)
    torch.set_num_threads(1)
    for name, case in CASES.items():
        named = dict(case)
        accumulates = named.pop("accumulates", False)
        with job.check(name):
            theirs = _train(job, _shard(job, _plain, **named), accumulates=accumulates)
            before = through_servers()
            ours = _train(job, _shard(job, _served("same"), **named), accumulates=accumulates)
            # Shards of two hosts, of three layers.
            assert through_servers() == before + STEPS * 2 * 3, "the wrong backend"
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    with job.check("a factor"):
        model = _shard(job, _served("same"))
        theirs = _train(job, _shard(job, _plain))
        modules: list[Any] = [*model.layers, model]
        for module in modules:
            module.set_gradient_divide_factor(2.0 * job.size)
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 1.0)
        torch.manual_seed(100 + job.rank)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, WIDTHS[0])).square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(whole_parameters(model), theirs)
    dist.destroy_process_group()


def few_bits(job: Job) -> None:
    """Train with gradients in blocks: results are within rounding of those of gloo or NCCL."""
    initialize(job)
    torch.set_num_threads(1)
    theirs = _train(job, _shard(job, _plain))
    for form, most in (("int8", 2e-3), ("int4", 3e-2)):
        with job.check(f"gradients in {form}"):
            before = bps.get_metrics()["byteps_worker_pushed_bytes_total"]
            model = _shard(job, _served(form))
            ours = _train(job, model)
            sent = bps.get_metrics()["byteps_worker_pushed_bytes_total"] - before
            numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
            if not on_gpu(job):
                assert sent < STEPS * numel * (1.2 if form == "int8" else 0.7), sent
            assert any(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=most)
    with job.check("layers of one length keep what each has lost"):
        _feed_back(job)
    dist.destroy_process_group()


def _feed_back(job: Job) -> None:
    """Check that in each layer the sum of many rounded gradients is close to the exact sum. One
    layer's gradients are a thousand times the other's, so a loss added to the wrong layer would
    show."""
    layers = nn.ModuleList([nn.Linear(128, 128, bias=False) for _ in range(2)])
    for layer in layers:
        fully_shard(layer)
    fsdp.apply(layers, wire_dtype="int4")
    torch.manual_seed(job.rank)
    given = torch.randn(1, 128) * 1e-3
    steps, sums = 30, [torch.zeros(()), torch.zeros(())]
    for _ in range(steps):
        for index, layer in enumerate(layers):
            layer.zero_grad()
            (1000.0**index * layer(given).sum()).backward()
            weight: Any = layer.weight
            sums[index] = sums[index] + weight.grad.full_tensor()
    want = given.clone()
    dist.all_reduce(want)
    want = want.expand(128, 128) / job.size
    for index, total in enumerate(sums):
        off = (total / steps / 1000.0**index - want).abs().max() / want.abs().max()
        assert float(off) < 0.02, (index, float(off))


def gathered(job: Job) -> None:
    """Gather parameters in 8 bits. Layers compute with rounded parameters, but checkpoints have
    exact ones."""
    initialize(job)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    given = torch.randn(8, WIDTHS[0])
    theirs, ours = _shard(job, _plain), _shard(job, _served("none", "int8"))
    with job.check("layers compute with nearly the same values, all ranks with one"):
        before, after = theirs(given), ours(given)
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, before, rtol=0, atol=0.02)
        others = [torch.empty_like(after) for _ in range(job.size)]
        dist.all_gather(others, after.detach())
        torch.testing.assert_close(others, [after] * job.size, rtol=0, atol=0)
    with job.check("parameters stay as they are"):
        torch.testing.assert_close(whole_parameters(ours), whole_parameters(theirs), rtol=0, atol=0)
    with job.check("they are trained"):
        torch.testing.assert_close(_train(job, ours), _train(job, theirs), rtol=0, atol=0.02)
    with job.check("a checkpoint has them as they are"):
        folder = str(job.folder / "checkpoint")
        dcp.save({"model": get_model_state_dict(ours)}, checkpoint_id=folder)
        saved = {"model": get_model_state_dict(theirs)}
        dcp.load(saved, checkpoint_id=folder)
        torch.testing.assert_close(whole_parameters(ours), whole_parameters(theirs), rtol=0, atol=0)
    with job.check("a gather in the background"):
        layer: Any = ours.layers[0]
        handle = layer.unshard(async_op=True)
        handle.wait()
        (want, *_) = whole_parameters(theirs.layers[0])
        torch.testing.assert_close(layer.weight, want, rtol=0, atol=0.02)
    with job.check("the backward pass goes on while another layer is gathered"):
        _gather_ahead(job, ours, given)
    dist.destroy_process_group()


def _gather_ahead(job: Job, model: Model, given: torch.Tensor) -> None:
    """Check that the backward pass does not wait for a gather: rank 0 computes the last layer's
    gradients before the other ranks, which wait for that, gather the layer before it."""
    last, everybody = model.layers[-1], dist.new_group(timeout=timedelta(seconds=60))

    def meet(*_: object) -> None:
        dist.barrier(everybody)

    last.set_reshard_after_forward(False)  # type: ignore[operator]
    if job.rank == 0:
        last.register_full_backward_hook(meet)
    output = model(given)
    if job.rank != 0:
        output.register_hook(meet)
    output.sum().backward()


def loop(job: Job) -> None:
    """Make steps without end. The test takes a peer away."""
    initialize(job)
    model = _shard(job, _served("int8"))
    while True:
        _train(job, model, 1)
        job.mark("looping")
