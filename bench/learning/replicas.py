"""Emulates replicas that step on their own, and exchange parameters once in many steps.

A single process simulates all replicas, one after the other, with the arithmetic of
`byteps.torch.diloco`: rows of tensors are replicas. Differences travel in bf16, or in few bits with
feedback, and the average is rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from byteps.torch import wire

from bench.learning.wires import FORMS, AdamW, servers_mean


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """Settings of the exchanges between replicas."""

    replicas: int
    every: int = 30
    """Number of steps between two exchanges."""
    lr: float = 0.6
    momentum: float = 0.9
    after: int = 0
    """Number of initial steps in which gradients are summed. Meanwhile the outer momentum is
    filled."""
    form: str = "bf16"
    """Type of differences and averages: bf16, int8 or int4."""


class Replicas:
    """Parameters and inner AdamW state of all replicas, and the outer optimizer.

    Like `wires.Hosts`, this class updates `held`, from which the model computes.
    """

    def __init__(self, held: torch.Tensor, few: int, count: int) -> None:
        """`held`: bf16 parameters of the replica that computes now, in whole blocks."""
        self.held, self._few = held, few
        numel, device = held.numel(), held.device
        self._replica_held = torch.zeros(count, numel, dtype=torch.bfloat16, device=device)
        self._master, self._mean, self._square = (
            torch.zeros(count, numel, device=device) for _ in range(3)
        )
        self.outer, self._momentum = (torch.zeros(numel, device=device) for _ in range(2))

    def start(self, recipe: LocalSteps, adamw: AdamW, values: torch.Tensor) -> None:
        """Begin with these fp32 parameters, and with a state of zeros."""
        self._recipe, self._adamw, self._steps = recipe, adamw, 0
        self.held.copy_(values)
        self._replica_held.copy_(self.held)
        self._master.copy_(self.held)
        self.outer.copy_(self.held)
        for state in (self._mean, self._square, self._momentum):
            state.zero_()
        count, numel = self._master.shape
        self._lost = self._lost_down = None
        if recipe.form != "bf16":
            form = FORMS[recipe.form]
            self._blocks = form.empty(count * numel, self.held.device)
            self._down = form.empty(numel, self.held.device)
            self._lost = torch.zeros(count * numel, dtype=torch.bfloat16, device=self.held.device)
            self._lost_down = torch.zeros(numel, dtype=torch.bfloat16, device=self.held.device)

    def choose(self, replica: int) -> None:
        """Let the model compute with this replica's parameters."""
        self.held.copy_(self._replica_held[replica])

    def step(self, few: torch.Tensor, exact: torch.Tensor, numbers: torch.Tensor) -> None:
        """Step each replica's AdamW, and exchange if an exchange is due. The arguments are those of
        `wires.Hosts.step`."""
        self._steps += 1
        gradients = torch.cat([few, exact], 1)
        is_summed = self._steps <= self._recipe.after
        if is_summed:
            gradients = servers_mean(gradients).expand_as(gradients)
        for row, gradient in enumerate(gradients):
            state = self._master[row], self._mean[row], self._square[row]
            self._adamw.update(gradient.float(), *state, numbers)
        if self._steps % self._recipe.every == 0:
            self._exchange(is_summed)
        self._replica_held.copy_(self._master)

    def finish(self) -> None:
        """Exchange, and let the model compute with the outer parameters."""
        if self._steps % self._recipe.every:
            self._exchange(is_summed=False)
        self.held.copy_(self.outer)

    def _exchange(self, is_summed: bool) -> None:
        """Make an outer step. While gradients are summed, the outer parameters follow the common
        ones, and the step only fills the momentum."""
        recipe = self._recipe
        if is_summed:
            self._momentum.mul_(recipe.momentum).add_(self.outer - self._master[0])
            self.outer.copy_(self._master[0])
            return
        gradient = self._average(self.outer - self._master)
        self._momentum.mul_(recipe.momentum).add_(gradient)
        self.outer.sub_((gradient + self._momentum * recipe.momentum) * recipe.lr)
        self._master.copy_(self.outer)

    def _average(self, differences: torch.Tensor) -> torch.Tensor:
        if len(differences) == 1:  # A single replica sends nothing, and so rounds nothing.
            return differences[0]
        if self._recipe.form == "bf16":
            return servers_mean(differences.to(torch.bfloat16)).float()
        form = FORMS[self._recipe.form]
        wire.encode(differences.view(-1), form, self._blocks, self._lost)
        wire.decode(self._blocks, form, differences.view(-1))
        total = servers_mean(differences)
        wire.encode(total, form, self._down, self._lost_down)
        wire.decode(self._down, form, total)
        return total
