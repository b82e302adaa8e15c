"""Gradients that gloo averages at the optimizer's step: textbook data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.border.interface import PLAIN, Interface, Options


class _ByHand(torch.optim.Optimizer):
    """Mix-in for an optimizer's class: averages gradients by gloo before a step.

    All parameters with a gradient on some rank are averaged, and a rank without a gradient counts
    as zero.
    """

    _group: Any

    def _average(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce().to_dense()
                total = parameter.grad.contiguous()
                dist.all_reduce(total, group=self._group)
                parameter.grad.copy_(total / dist.get_world_size(self._group))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            self._average()
            return super().step()

        def averaged() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._average()
            return loss

        return super().step(averaged)


class AveragedByHand(Interface):
    """Interface with gradients that gloo averages at the optimizer's step."""

    name = "gloo"
    reference = "gloo"

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options = PLAIN
    ) -> tuple[nn.Module, Any]:
        made = type(optimizer.__class__.__name__, (_ByHand, optimizer.__class__), {})
        optimizer.__class__ = made
        optimizer._group = options.group  # type: ignore[attr-defined]
        return model, optimizer

    def scaler(self, optimizer: Any) -> Any:
        return _ScalerByHand()


class _ScalerByHand:
    """Loss scaling like torch's GradScaler, for gradients averaged by DDP: equal on all ranks."""

    def __init__(self) -> None:
        self._scale = 1024.0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self._scale

    def step(self, optimizer: Any) -> None:
        optimizer._average()
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"]]
        self._overflowed = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        for gradient in gradients:
            gradient.div_(self._scale)
        if not self._overflowed:
            super(_ByHand, optimizer).step()  # type: ignore[misc]

    def update(self) -> None:
        self._scale *= 0.5 if self._overflowed else 1.0

    def get_scale(self) -> float:
        return self._scale
