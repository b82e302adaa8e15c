"""Interfaces of Megatron programs with a training loop of their own; over gloo too."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from tests.border.interface import PLAIN, TIMEOUT, Interface, Options


class MegatronGloo(Interface):
    """Megatron's DistributedDataParallel and optimizer, combined without its training loop."""

    name = "megatron-gloo"
    reference = "megatron-gloo"
    flags: ClassVar[dict[str, Any]] = {}
    """Fields of DistributedDataParallelConfig."""
    takes_groups = False

    def start(self, folder: Path) -> None:
        from megatron.core import parallel_state
        from megatron.training import cpu_platform

        cpu_platform.install()
        Interface.start(self, folder)
        parallel_state.initialize_model_parallel()

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options = PLAIN
    ) -> tuple[nn.Module, Any]:
        from megatron.core.distributed import (
            DistributedDataParallel as Wrapped,
        )
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.transformer.transformer_config import TransformerConfig

        transformer = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        config = DistributedDataParallelConfig(
            overlap_grad_reduce=not options.unused, bucket_size=5000, **self.flags
        )
        wrapped = Wrapped(transformer, config, model)
        return wrapped, _MegatronStep(
            wrapped, optimizer.param_groups[0]["lr"], fp16=self.scales_loss
        )

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        return model.no_sync()  # type: ignore[operator]

    def scaler(self, optimizer: Any) -> Any:
        return _MegatronScaler(optimizer)

    def end(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import dpu_reduce

        dpu_reduce.shutdown()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class _MegatronStep:
    """Megatron's optimizer with torch's method names; calls are in the order of Megatron's loop."""

    def __init__(self, wrapped: Any, lr: float, *, fp16: bool) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        scaling = {"fp16": True, "initial_loss_scale": 1024.0} if fp16 else {}
        config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=lr, clip_grad=0.0, **scaling)
        self._wrapped = wrapped
        self._optimizer = get_megatron_optimizer(config, [wrapped])
        self.param_groups = self._optimizer.param_groups

    def zero_grad(self) -> None:
        self._wrapped.zero_grad_buffer()
        self._optimizer.zero_grad()

    def step(self, *arguments: Any) -> None:
        self._wrapped.finish_grad_sync()
        self._optimizer.step(*arguments)

    def add_param_group(self, group: dict[str, Any]) -> None:
        self._optimizer.add_param_group(group)


class _MegatronScaler:
    """The loss scale of Megatron's optimizer, with the method names of torch's scaler."""

    def __init__(self, optimizer: _MegatronStep) -> None:
        self._inner = optimizer._optimizer

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self._inner.scale_loss(loss)

    def step(self, optimizer: _MegatronStep) -> None:
        optimizer.step()

    def update(self) -> None:
        """Do nothing, because Megatron's step has updated the scale."""

    def get_scale(self) -> float:
        return float(self._inner.get_loss_scale())


class Megatron(MegatronGloo):
    """Megatron with ``use_dpu_reduce``."""

    name = "--use-dpu-reduce"
    through_servers = True
    flags: ClassVar[dict[str, Any]] = {"use_dpu_reduce": True, "dpu_reduce_backend": "flat"}

    def start(self, folder: Path) -> None:
        from megatron.core import parallel_state
        from megatron.training import cpu_platform

        cpu_platform.install()
        dist.init_process_group("gloo", timeout=TIMEOUT)
        parallel_state.initialize_model_parallel()


class MegatronServed(Megatron):
    """Megatron with ``dpu_optimizer``."""

    name = "--dpu-optimizer"
    flags: ClassVar[dict[str, Any]] = {"dpu_optimizer": True, "dpu_reduce_backend": "flat"}
    tolerance = 1e-5
