"""The base of the interfaces through which a program's gradients are reduced.

With an interface, a scenario (scenarios.py) stays a plain PyTorch program: `start`, `wrap` a model
and its optimizer, train, `end`.
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
"""Limit against hangs of torch's own collectives."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that a program gives when it wraps a model."""

    group: Any = None
    """A process group; None for all ranks."""
    passes: int = 1
    """Backward passes per step."""
    unused: bool = False
    """Whether a backward pass may omit parameters."""


PLAIN = Options()


class Interface:
    """Plain PyTorch over gloo; the base of all others."""

    name = "gloo"
    reference = "gloo"
    """Name of the gloo interface whose results are right for this interface."""
    references: ClassVar[dict[str, str]] = {}
    """Another reference for some scenarios."""
    through_servers = False
    takes_groups = True
    """Whether a model can be wrapped for a group of some ranks."""
    ranks_may_differ = True
    """Whether ranks may use different layers in a step."""
    tolerance = 0.0
    """Largest relative difference from the reference. Usually 0, because only two values
    are added."""
    sums_belong_to_group = False
    """Whether servers keep a tensor until its group ends, instead of until its model ends."""
    environment: ClassVar[dict[str, str]] = {}

    scales_loss = False
    """Whether Megatron's optimizer scales the loss. Set before a model is wrapped."""

    def start(self, folder: Path) -> None:
        """Create the world's process group."""
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
        """Average a model's gradients over a group.

        Args:
            model: The same parameters on every rank.
            optimizer: A torch optimizer over this model's parameters.
            options: The program's other choices.
        """
        raise NotImplementedError

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context of a backward pass whose gradients are reduced together with those of a later
        pass."""
        return contextlib.nullcontext()

    def scaler(self, optimizer: Any) -> Any:
        """Get torch's GradScaler or its replacement."""
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)

    def reduce(self, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        """Sum a tensor over a group."""
        dist.all_reduce(tensor, group=group)
        return tensor

    def discard(self, model: nn.Module, optimizer: Any) -> None:
        """Drop a wrapped model for good."""

    def end(self) -> None:
        """Leave the job, and destroy the world's process group."""
        dist.destroy_process_group()
