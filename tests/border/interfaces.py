"""The interfaces by which a program has its gradients reduced, and the ones they are compared with.

Each lets a scenario (scenarios.py) stay a plain PyTorch program: `start`, `wrap` a model and its
optimizer, train, `end`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = timedelta(seconds=200)
"""Bound against hangs of torch's own collectives."""


class Interface:
    """Plain PyTorch over gloo; the base of all others."""

    name = "gloo"
    reference = "gloo"
    """Name of the interface over gloo whose results are right for this one."""
    references: dict[str, str] = {}
    """Another one, for some scenarios."""
    through_servers = False
    takes_groups = True
    """Whether a model can be wrapped for a group of ranks other than the world."""
    ranks_may_differ = True
    """Whether ranks may use different layers in a step."""
    tolerance = 0.0
    """Largest relative difference from the reference. Two values are added: 0 is the rule."""
    environment: dict[str, str] = {}

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
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: Any = None,
        passes: int = 1,
        unused: bool = False,
    ) -> tuple[nn.Module, Any]:
        """Have the gradients of a model averaged over a group.

        Args:
            model: the same parameters on every rank.
            optimizer: one of torch's, over this model's parameters.
            group: a process group; None for all ranks.
            passes: backward passes per step.
            unused: whether a backward pass may leave out parameters.
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


class Ddp(Interface):
    """torch's DistributedDataParallel over gloo."""

    name = "ddp-gloo"
    reference = "ddp-gloo"

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: Any = None,
        passes: int = 1,
        unused: bool = False,
    ) -> tuple[nn.Module, Any]:
        wrapped = DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=0.02, find_unused_parameters=unused
        )
        return wrapped, optimizer

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        assert isinstance(model, DistributedDataParallel)
        return model.no_sync()


class _ByHand(torch.optim.Optimizer):
    """What is added to an optimizer's class: before a step, gradients are averaged by gloo.

    The textbook of data parallelism: whatever has a gradient on some rank at the step is averaged,
    and a rank without one counts as zero.
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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
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
    """Gradients averaged by gloo at the optimizer's step."""

    name = "gloo"
    reference = "gloo"

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: Any = None,
        passes: int = 1,
        unused: bool = False,
    ) -> tuple[nn.Module, Any]:
        made = type(optimizer.__class__.__name__, (_ByHand, optimizer.__class__), {})
        optimizer.__class__ = made
        optimizer._group = group  # type: ignore[attr-defined]
        return model, optimizer

    def scaler(self, optimizer: Any) -> Any:
        return _ScalerByHand()


class _ScalerByHand:
    """What torch's GradScaler does with gradients that DDP has averaged: all ranks see the same."""

    def __init__(self) -> None:
        self._scale = 1024.0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self._scale

    def step(self, optimizer: Any) -> None:
        optimizer._average()
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"]]
        self._found = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        for gradient in gradients:
            gradient.div_(self._scale)
        if not self._found:
            super(_ByHand, optimizer).step()

    def update(self) -> None:
        self._scale *= 0.5 if self._found else 1.0

    def get_scale(self) -> float:
        return self._scale


class _Served(Interface):
    """The base of interfaces whose sums go through servers, which start with the job."""

    through_servers = True
    environment = {"BYTEPS_C10D_BACKEND": "flat", "BYTEPS_C10D_MIN_BYTES": "1"}

    def start(self, folder: Path) -> None:
        import byteps.torch as bps

        dist.init_process_group("gloo", timeout=TIMEOUT)
        bps.init()

    def end(self) -> None:
        import byteps.torch as bps

        bps.shutdown()
        dist.destroy_process_group()


class DistributedOptimizer(_Served):
    """`bps.DistributedOptimizer`."""

    name = "DistributedOptimizer"
    reference = "ddp-gloo"
    # DDP leaves out what needed no gradient, or was no parameter, when it was made.
    references = {"unfrozen-later": "gloo", "added-later": "gloo"}
    takes_groups = False

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: Any = None,
        passes: int = 1,
        unused: bool = False,
    ) -> tuple[nn.Module, Any]:
        import byteps.torch as bps

        return model, bps.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            backward_passes_per_step=passes,
        )

    def discard(self, model: nn.Module, optimizer: Any) -> None:
        del model, optimizer
        gc.collect()


class ServerOptimizer(_Served):
    """`bps.ServerOptimizer`."""

    name = "ServerOptimizer"
    reference = "gloo"
    # A scheduler that was made before has the torch optimizer's own step.
    references = {"scheduler-made-before": "ddp-gloo"}
    tolerance = 1e-5

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: Any = None,
        passes: int = 1,
        unused: bool = False,
    ) -> tuple[nn.Module, Any]:
        import byteps.torch as bps

        name = "optimizer" if group is None else group.group_name
        return model, bps.ServerOptimizer(optimizer, group=group, name=name)

    def discard(self, model: nn.Module, optimizer: Any) -> None:
        optimizer.close()


class DdpHook(_Served, Ddp):
    """DistributedDataParallel with `bps.ddp_comm_hook`."""

    name = "ddp_comm_hook"
    reference = "ddp-gloo"

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: Any = None,
        passes: int = 1,
        unused: bool = False,
    ) -> tuple[nn.Module, Any]:
        import byteps.torch as bps

        wrapped, optimizer = Ddp.wrap(self, model, optimizer, group=group, unused=unused)
        wrapped.register_comm_hook(group, bps.ddp_comm_hook)  # type: ignore[operator]
        return wrapped, optimizer


class C10d(Ddp):
    """DistributedDataParallel in a program that knows nothing of BytePS: BYTEPS_C10D=1."""

    name = "BYTEPS_C10D"
    reference = "ddp-gloo"
    through_servers = True
    environment = _Served.environment

    def start(self, folder: Path) -> None:
        from byteps import c10d_plugin

        c10d_plugin.install()  # as `import torch` does with the variable
        dist.init_process_group("gloo", timeout=TIMEOUT)


class FsdpGloo(Interface):
    """FSDP2 with a mesh of two dimensions (HSDP) over gloo: every rank is a host of its own."""

    name = "fsdp2-gloo"
    reference = "fsdp2-gloo"
    ranks_may_differ = False
    _alone: Any = None
    """The group of this rank alone."""

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: Any = None,
        passes: int = 1,
        unused: bool = False,
    ) -> tuple[nn.Module, Any]:
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
        from torch.distributed.fsdp import fully_shard

        shape = (dist.get_world_size(), 1)
        if group is None:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        else:
            if self._alone is None:
                self._alone = [dist.new_group([rank]) for rank in range(shape[0])][dist.get_rank()]
            mesh = DeviceMesh.from_group(
                [group, self._alone],
                "cpu",
                mesh=torch.arange(shape[0]).view(shape),
                mesh_dim_names=("replicate", "shard"),
            )
        names = {parameter: name for name, parameter in model.named_parameters()}
        stepped = [names[p] for group in optimizer.param_groups for p in group["params"]]
        sharded = fully_shard(model, mesh=mesh)
        parameters = dict(sharded.named_parameters())
        # As users do: FSDP2 puts other parameters in the place of those that the optimizer has.
        (group_of_all,) = optimizer.param_groups
        group_of_all["params"] = [parameters[name] for name in stepped]
        return sharded, optimizer

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        return _without_sync(model)


@contextlib.contextmanager
def _without_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


class Fsdp(FsdpGloo, C10d):
    """The same with BYTEPS_C10D=1: all-reduces over hosts go through servers."""

    name = "FSDP2"
    reference = "fsdp2-gloo"
    through_servers = True
    environment = _Served.environment

    def start(self, folder: Path) -> None:
        C10d.start(self, folder)

    def wrap(self, *args: Any, **named: Any) -> tuple[nn.Module, Any]:
        return FsdpGloo.wrap(self, *args, **named)

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        return FsdpGloo.accumulating(self, model)


class MegatronGloo(Interface):
    """Megatron's DistributedDataParallel and optimizer, put together without its training loop."""

    name = "megatron-gloo"
    reference = "megatron-gloo"
    flags: dict[str, Any] = {}
    """Of DistributedDataParallelConfig."""
    takes_groups = False

    def __init__(self) -> None:
        self.fp16 = False

    def start(self, folder: Path) -> None:
        from megatron.core import parallel_state
        from megatron.training import cpu_platform

        cpu_platform.install()
        Interface.start(self, folder)
        parallel_state.initialize_model_parallel()

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: Any = None,
        passes: int = 1,
        unused: bool = False,
    ) -> tuple[nn.Module, Any]:
        from megatron.core.distributed import (
            DistributedDataParallel as Wrapped,
        )
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.transformer.transformer_config import TransformerConfig

        transformer = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        config = DistributedDataParallelConfig(
            overlap_grad_reduce=not unused, bucket_size=5000, **self.flags
        )
        wrapped = Wrapped(transformer, config, model)
        return wrapped, _MegatronStep(wrapped, optimizer.param_groups[0]["lr"], fp16=self.fp16)

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        return model.no_sync()  # type: ignore[operator,no-any-return]

    def scaler(self, optimizer: Any) -> Any:
        return optimizer

    def end(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import dpu_reduce

        dpu_reduce.shutdown()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class _MegatronStep:
    """Megatron's optimizer, with the order of calls of its training loop behind torch's names."""

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

    # As a scaler: Megatron's optimizer has its own.

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self._optimizer.scale_loss(loss)  # type: ignore[no-any-return]

    def update(self) -> None:
        pass

    def get_scale(self) -> float:
        return float(self._optimizer.get_loss_scale())


class Megatron(MegatronGloo):
    """The same with ``use_dpu_reduce``."""

    name = "--use-dpu-reduce"
    through_servers = True
    flags = {"use_dpu_reduce": True, "dpu_reduce_route": "flat"}

    def start(self, folder: Path) -> None:
        from megatron.core import parallel_state
        from megatron.training import cpu_platform

        cpu_platform.install()
        dist.init_process_group("gloo", timeout=TIMEOUT)
        parallel_state.initialize_model_parallel()


class MegatronServed(Megatron):
    """The same with ``dpu_optimizer``."""

    name = "--dpu-optimizer"
    flags = {"dpu_optimizer": True, "dpu_reduce_route": "flat"}
    tolerance = 1e-5


SERVED: tuple[type[Interface], ...] = (
    DistributedOptimizer,
    ServerOptimizer,
    DdpHook,
    C10d,
    Fsdp,
    Megatron,
    MegatronServed,
)
"""The columns of the matrix."""

_ALL = {
    interface.name: interface
    for interface in itertools.chain(SERVED, (AveragedByHand, Ddp, FsdpGloo, MegatronGloo))
}


def make(name: str) -> Interface:
    """The interface of this name."""
    return _ALL[name]()
