"""The base of the interfaces by which a program has its gradients reduced.

Each lets a scenario (scenarios.py) stay a plain PyTorch program: `start`, `wrap` a model and its
optimizer, train, `end`.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

TIMEOUT = timedelta(seconds=200)
"""Bound against hangs of torch's own collectives."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that a program gives when it wraps a model."""

    group: Any = None
    """A process group; None for all ranks."""
    passes: int = 1
    """Backward passes per step."""
    unused: bool = False
    """Whether a backward pass may leave out parameters."""


PLAIN = Options()


class Interface:
    """Plain PyTorch over gloo; the base of all others."""

    name = "gloo"
    reference = "gloo"
    """Name of the interface over gloo whose results are right for this one."""
    references: ClassVar[dict[str, str]] = {}
    """Another one, for some scenarios."""
    through_servers = False
    takes_groups = True
    """Whether a model can be wrapped for a group of ranks other than the world."""
    ranks_may_differ = True
    """Whether ranks may use different layers in a step."""
    tolerance = 0.0
    """Largest relative difference from the reference. Two values are added: 0 is the rule."""
    sums_belong_to_group = False
    """Whether servers keep a tensor as long as its group lives, instead of its model."""
    environment: ClassVar[dict[str, str]] = {}

    scales_loss = False
    """Whether Megatron's optimizer scales the loss: to be set before a model is wrapped."""

    def start(self, folder: Path) -> None:
        """Make the world's process group."""
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store-{self.name}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=TIMEOUT,
        )

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options = PLAIN
    ) -> tuple[nn.Module, Any]:
        """Have the gradients of a model averaged over a group.

        Args:
            model: the same parameters on every rank.
            optimizer: one of torch's, over this model's parameters.
            options: what else a program says when it wraps them.
        """
        raise NotImplementedError

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context of a backward pass whose gradients are reduced with those of a later one."""
        return contextlib.nullcontext()

    def scaler(self, optimizer: Any) -> Any:
        """torch's GradScaler, or what stands for it."""
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)

    def reduce(self, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        """Sum a tensor over a group."""
        dist.all_reduce(tensor, group=group)
        return tensor

    def discard(self, model: nn.Module, optimizer: Any) -> None:
        """Give up a wrapped model for good."""

    def end(self) -> None:
        """Leave the job, and destroy the world's process group."""
        dist.destroy_process_group()
