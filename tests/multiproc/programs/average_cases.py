"""Programs beyond those of tests/border whose average gradients are compared with DDP's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.border.interface import Options
from tests.border.scenarios import LR, STEPS, Forked, Run, inputs, loss_of, make_model, sgd, train


def clipped_after_unscaling(run: Run) -> None:
    """Train with gradients that are averages after the pass, and that may be unscaled and
    clipped."""
    model = make_model()
    wrapped, optimizer = run.interface.wrap(model, sgd(model))
    scaler = run.interface.scaler(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(wrapped, inputs(run, step))).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
    run.keep("model", model)


def line_search(run: Run) -> None:
    """Train with LBFGS, which compares losses that differ by rank."""
    model = make_model()
    made = torch.optim.LBFGS(model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
    wrapped, optimizer = run.interface.wrap(model, made)

    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(wrapped, inputs(run, 0))
        loss.backward()
        if run.interface.through_servers:
            return loss
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    for _ in range(2):
        optimizer.step(closure=compute)
    run.keep("model", model)


def unused(run: Run) -> None:
    """Train with parameters that one rank, both ranks, or no rank uses, also in the second of two
    passes.

    Momentum and weight decay distinguish a gradient of zeros from a missing gradient.
    """
    model = Forked()
    made = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5, weight_decay=0.01)
    wrapped, optimizer = run.interface.wrap(model, made, Options(unused=True))
    for step in range(8):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for part in range(2):
            detour = bool((step + part) >> run.rank & 1)
            wrapped(inputs(run, step, part=part), detour).square().mean().backward()
        optimizer.step()
    assert model.never.weight.grad is None
    run.keep("model", model)


def sparse_alone(run: Run) -> None:
    """Average gradients for an optimizer that accepts only sparse ones, with repeated words."""
    torch.manual_seed(5)
    model = nn.Embedding(50, 24, sparse=True)
    wrapped, optimizer = run.interface.wrap(model, torch.optim.SparseAdam(model.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped((torch.arange(12) * 7 + 3 * step + 14 * run.rank) % 20).square().mean().backward()
        assert model.weight.grad is not None and model.weight.grad.is_sparse
        optimizer.step()
    run.keep("model", model)


def another_layout_on_one_rank(run: Run) -> None:
    """Average the gradient of a transposed parameter, whose layout differs on one rank."""
    torch.manual_seed(5)
    model = nn.Linear(16, 8)
    model.weight = nn.Parameter(torch.randn(16, 8).mul(0.1).t())
    wrapped, optimizer = run.interface.wrap(model, sgd(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        if run.rank == 1:
            model.weight.grad = torch.zeros(8, 16)
        loss_of(wrapped, inputs(run, step)).backward()
        optimizer.step()
    run.keep("model", model)


class _Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.turns = nn.Parameter(torch.randn(16, dtype=torch.complex64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(values * self.turns)


def complex_numbers(run: Run) -> None:
    model = _Turning()
    wrapped, optimizer = run.interface.wrap(model, sgd(model))
    train(run, wrapped, optimizer)
    run.keep("model", model)


class _Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(make_model(seed) for seed in (5, 6))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values.detach().requires_grad_(True)
        for part in self.parts:
            values = checkpoint(
                lambda v, part=part: part(v).repeat(1, 2), values, use_reentrant=True
            )
        return values


def recomputed(run: Run) -> None:
    """Make backward passes inside a backward pass. The inner passes have all parameters."""
    model = _Recomputed()
    wrapped, optimizer = run.interface.wrap(model, sgd(model))
    train(run, wrapped, optimizer)
    run.keep("model", model)


def wrapped_again(run: Run) -> None:
    """Use a second optimizer over the same model while the first one exists."""
    model = make_model()
    first, optimizer = run.interface.wrap(model, sgd(model))
    train(run, first, optimizer, range(2))
    made: Any = torch.optim.Adam(model[2:].parameters(), lr=0.01)
    second, other = run.interface.wrap(model, made)
    del first
    train(run, second, other, range(2, STEPS))
    run.keep("model", model)


CASES: tuple[Callable[[Run], None], ...] = (
    *(clipped_after_unscaling, line_search, unused, sparse_alone, another_layout_on_one_rank),
    *(complex_numbers, recomputed, wrapped_again),
)
