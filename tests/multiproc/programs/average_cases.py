"""Programs whose average gradients are compared with DDP's: each trains a model on a "side".

A side is a way to average gradients. Each program runs on two sides, with the same initial
parameters and inputs; inputs differ by rank and step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import byteps.torch as bps
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.multiproc.programs.job import Job

STEPS = 4
RATE = 0.1


class Ours:
    """Gradients averaged by bps.DistributedOptimizer."""

    def __init__(self, job: Job) -> None:
        self.rank = job.rank

    def wrap(
        self, model: nn.Module, optimizer: Any, *, unused: bool = False, passes: int = 1
    ) -> tuple[Any, Any]:
        del unused
        return model, bps.DistributedOptimizer(optimizer, backward_passes_per_step=passes)

    def apart(self, model: Any) -> AbstractContextManager[Any]:
        """Context for a backward pass whose gradients add up on the rank."""
        del model
        return nullcontext()

    def mean_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for an optimizer that compares losses."""
        return loss


class Theirs(Ours):
    """Gradients averaged by DDP."""

    def wrap(
        self, model: nn.Module, optimizer: Any, *, unused: bool = False, passes: int = 1
    ) -> tuple[Any, Any]:
        del passes
        return DistributedDataParallel(model, find_unused_parameters=unused), optimizer

    def apart(self, model: Any) -> AbstractContextManager[Any]:
        return model.no_sync()

    def mean_loss(self, loss: torch.Tensor) -> torch.Tensor:
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


class Served(Ours):
    """Gradients averaged, and parameters updated, by servers."""

    def __init__(self, job: Job, name: str, **options: Any) -> None:
        super().__init__(job)
        self.name, self.options = name, options

    def wrap(
        self, model: nn.Module, optimizer: Any, *, unused: bool = False, passes: int = 1
    ) -> tuple[Any, Any]:
        del unused, passes
        return model, bps.ServerOptimizer(optimizer, name=self.name, **self.options)


def layers(seed: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 8)
    )


def inputs(
    side: Ours, step: int, *, part: int = 0, shape: tuple[int, ...] = (6, 16)
) -> torch.Tensor:
    count = torch.Size(shape).numel()
    numbers = torch.arange(count, dtype=torch.float32).view(shape)
    return torch.sin(numbers * 0.37 + 11 * step + 5 * part + 3 * side.rank)


def loss_of(model: Any, values: torch.Tensor) -> torch.Tensor:
    return model(values).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum and weight decay distinguish a gradient of zeros from a missing gradient."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5, weight_decay=0.01)


def train(side: Ours, model: Any, optimizer: Any, steps: range = range(STEPS)) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, inputs(side, step)).backward()
        optimizer.step()


def plain(side: Ours) -> nn.Module:
    model = layers()
    wrapped, optimizer = side.wrap(model, sgd(model))
    train(side, wrapped, optimizer)
    return model


def gradients_after_the_pass(side: Ours) -> nn.Module:
    """Gradients are averages after the pass, and may be clipped."""
    model = layers()
    wrapped, optimizer = side.wrap(model, sgd(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, inputs(side, step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return model


def scaler(side: Ours) -> nn.Module:
    """In step 1 the loss of rank 1 overflows: all ranks skip the step."""
    model = layers()
    wrapped, optimizer = side.wrap(model, sgd(model))
    scales = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(wrapped, inputs(side, step))
        scales.scale(loss * torch.inf if step == 1 and side.rank == 1 else loss).backward()
        if step == 2:
            scales.unscale_(optimizer)
        scales.step(optimizer)
        scales.update()
    assert scales.get_scale() == 512.0, scales.get_scale()
    return model


def closure(side: Ours) -> nn.Module:
    model = layers()
    wrapped, optimizer = side.wrap(model, sgd(model))
    for step in range(STEPS):

        def compute(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(wrapped, inputs(side, step))
            loss.backward()
            return loss

        if step % 2:
            optimizer.step(compute)
        else:
            optimizer.step(closure=compute)
    return model


def lbfgs(side: Ours) -> nn.Module:
    """LBFGS compares losses, which differ by rank."""
    model = layers()
    made = torch.optim.LBFGS(model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
    wrapped, optimizer = side.wrap(model, made)

    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(wrapped, inputs(side, 0))
        loss.backward()
        return side.mean_loss(loss)

    for _ in range(2):
        optimizer.step(compute)
    return model


def unfrozen(side: Ours) -> nn.Module:
    """In step 2 only parameters that were frozen before learn."""
    model = layers()
    model[0].requires_grad_(False)
    made = sgd(model)
    wrapped, optimizer = side.wrap(model, made)
    train(side, wrapped, optimizer, range(2))
    for index, layer in enumerate(model):
        layer.requires_grad_(index == 0)
        layer.zero_grad()
    if isinstance(side, Theirs):  # DDP checks this at construction.
        wrapped, _ = side.wrap(model, made)
    train(side, wrapped, optimizer, range(2, STEPS))
    return model


def added(side: Ours) -> nn.Module:
    model = layers()
    wrapped, optimizer = side.wrap(model, torch.optim.SGD(model[2:].parameters(), lr=RATE))
    train(side, wrapped, optimizer, range(2))
    model.zero_grad()
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": RATE / 2})
    train(side, wrapped, optimizer, range(2, STEPS))
    return model


def scheduled_before(side: Ours) -> nn.Module:
    model = layers()
    made = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    wrapped, optimizer = side.wrap(model, made)
    for step in range(STEPS):
        train(side, wrapped, optimizer, range(step, step + 1))
        schedule.step()
    return model


def two_passes(side: Ours) -> nn.Module:
    model = layers()
    wrapped, optimizer = side.wrap(model, sgd(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, inputs(side, step)).backward()
        (0.5 * loss_of(wrapped, inputs(side, step, part=1))).backward()
        optimizer.step()
    return model


def accumulated(side: Ours) -> nn.Module:
    """Three passes per step."""
    model = layers()
    wrapped, optimizer = side.wrap(model, sgd(model), passes=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            with side.apart(wrapped) if part < 2 else nullcontext():
                loss_of(wrapped, inputs(side, step, part=part)).backward()
        optimizer.step()
    return model


class Forked(nn.Module):
    """A layer that callers may skip, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 8)
        self.sometimes, self.never = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, values: torch.Tensor, detour: bool) -> torch.Tensor:
        values = torch.tanh(self.first(values))
        return self.last(torch.tanh(self.sometimes(values)) if detour else values)


def unused(side: Ours) -> nn.Module:
    """Parameters unused by one rank, by both, or never used; also in the second of two passes."""
    model = Forked()
    wrapped, optimizer = side.wrap(model, sgd(model), unused=True)
    for step in range(8):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for part in range(2):
            detour = bool((step + part) >> side.rank & 1)
            wrapped(inputs(side, step, part=part), detour).square().mean().backward()
        optimizer.step()
    assert model.never.weight.grad is None
    return model


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words, self.last = nn.Embedding(50, 24, sparse=True), nn.Linear(24, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(words))


def sparse(side: Ours) -> nn.Module:
    """Sparse gradients, for an optimizer that accepts only these; words are repeated, also across
    ranks."""
    model = Words()
    made = torch.optim.SparseAdam(model.words.parameters(), lr=RATE)
    wrapped, optimizer = side.wrap(model, made)
    for step in range(STEPS):
        model.zero_grad()
        words = (torch.arange(12) * 7 + 3 * step + 14 * side.rank) % 20
        wrapped(words).square().mean().backward()
        gradient = model.words.weight.grad
        assert gradient is not None and gradient.is_sparse
        optimizer.step()
    model.last.requires_grad_(False)
    return model


def words(side: Ours) -> nn.Module:
    """Sparse and dense gradients in the same optimizer."""
    model = Words()
    wrapped, optimizer = side.wrap(model, torch.optim.SGD(model.parameters(), lr=RATE))
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped((torch.arange(12) * 7 + 3 * step) % 20).square().mean().backward()
        optimizer.step()
    return model


def strided(side: Ours) -> nn.Module:
    """Channels last, a transposed parameter, and a gradient with another layout on one rank."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.Flatten())
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.append(nn.Linear(64, 8))
    # Small, or the loss grows at each step and rounding decides the digits that are compared.
    transposed = nn.Parameter(torch.randn(64, 8).mul(0.1).t())
    model[4].weight = transposed
    wrapped, optimizer = side.wrap(model, sgd(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        if side.rank == 1:
            transposed.grad = torch.zeros(8, 64)
        image = inputs(side, step, shape=(6, 4, 8, 8)).contiguous(memory_format=torch.channels_last)
        loss_of(wrapped, image).backward()
        optimizer.step()
    return model


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.empty = layers(), nn.Parameter(torch.zeros(3, 0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.body(values) + self.empty.sum()


def empty(side: Ours) -> nn.Module:
    model = WithEmpty()
    wrapped, optimizer = side.wrap(model, sgd(model))
    train(side, wrapped, optimizer)
    return model


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.turns = nn.Parameter(torch.randn(16, dtype=torch.complex64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(values * self.turns)


def complex_numbers(side: Ours) -> nn.Module:
    model = Turning()
    wrapped, optimizer = side.wrap(model, sgd(model))
    train(side, wrapped, optimizer)
    return model


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layers(seed) for seed in (5, 6))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values.detach().requires_grad_(True)
        for part in self.parts:
            values = checkpoint(
                lambda v, part=part: part(v).repeat(1, 2), values, use_reentrant=True
            )
        return values


def recomputed(side: Ours) -> nn.Module:
    """Backward passes inside a backward pass, with all parameters in the inner ones."""
    model = Recomputed()
    wrapped, optimizer = side.wrap(model, sgd(model))
    train(side, wrapped, optimizer)
    return model


def wrapped_again(side: Ours) -> nn.Module:
    """A second optimizer over the same model, while the first exists."""
    model = layers()
    first, optimizer = side.wrap(model, sgd(model))
    train(side, first, optimizer, range(2))
    second, other = side.wrap(model, torch.optim.Adam(model[2:].parameters(), lr=0.01))
    del first
    train(side, second, other, range(2, STEPS))
    return model


CASES: tuple[Callable[[Ours], nn.Module], ...] = (
    *(plain, gradients_after_the_pass, scaler, closure, lbfgs, unfrozen, added, scheduled_before),
    *(two_passes, accumulated, unused, sparse, words, strided, empty, complex_numbers, recomputed),
)
