"""Interfaces of PyTorch programs: optimizers, DistributedDataParallel, FSDP2; over gloo too."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.border.interface import PLAIN, TIMEOUT, Interface, Options


class Ddp(Interface):
    """torch's DistributedDataParallel over gloo."""

    name = "ddp-gloo"
    reference = "ddp-gloo"

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options = PLAIN
    ) -> tuple[nn.Module, Any]:
        wrapped = DistributedDataParallel(
            model,
            process_group=options.group,
            bucket_cap_mb=0.02,
            find_unused_parameters=options.unused,
        )
        return wrapped, optimizer

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        assert isinstance(model, DistributedDataParallel)
        return model.no_sync()


# torch's DDP drops a group's last reference with the GIL held, and then waits for gloo's threads. A
# gloo thread that drops its last operation waits for the GIL: a deadlock without BytePS, too.
_WITHOUT_DDP: dict[str, str] = {"group-made-again": "gloo"}
"""References for scenarios in which a gloo group under DDP is unreliable."""


class Served(Interface):
    """The base of interfaces with sums on servers, which start with the job."""

    through_servers = True
    environment: ClassVar[dict[str, str]] = {
        "BYTEPS_C10D_BACKEND": "flat",
        "BYTEPS_C10D_MIN_BYTES": "1",
    }

    def start(self, folder: Path) -> None:
        import byteps.torch as bps

        dist.init_process_group("gloo", timeout=TIMEOUT)
        bps.init()

    def end(self) -> None:
        import byteps.torch as bps

        bps.shutdown()
        dist.destroy_process_group()


class DistributedOptimizer(Served):
    """`bps.DistributedOptimizer`."""

    name = "DistributedOptimizer"
    reference = "ddp-gloo"
    # DDP ignores parameters that were frozen or missing at its creation.
    references: ClassVar[dict[str, str]] = {"unfrozen-later": "gloo", "added-later": "gloo"}
    takes_groups = False

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options = PLAIN
    ) -> tuple[nn.Module, Any]:
        import byteps.torch as bps

        return model, bps.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            backward_passes_per_step=options.passes,
        )

    def discard(self, model: nn.Module, optimizer: Any) -> None:
        del model, optimizer
        gc.collect()


class ServerOptimizer(Served):
    """Interface whose model is trained by `bps.ServerOptimizer`."""

    name = "ServerOptimizer"
    reference = "gloo"
    # A scheduler that was made before has the torch optimizer's own step.
    references: ClassVar[dict[str, str]] = {"scheduler-made-before": "ddp-gloo"}
    tolerance = 1e-5

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options = PLAIN
    ) -> tuple[nn.Module, Any]:
        import byteps.torch as bps

        name = "optimizer" if options.group is None else options.group.group_name
        return model, bps.ServerOptimizer(optimizer, group=options.group, name=name)

    def discard(self, model: nn.Module, optimizer: Any) -> None:
        optimizer.close()


class DdpHook(Served, Ddp):
    """DistributedDataParallel with `bps.ddp_comm_hook`."""

    name = "ddp_comm_hook"
    sums_belong_to_group = True
    reference = "ddp-gloo"
    references = _WITHOUT_DDP

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options = PLAIN
    ) -> tuple[nn.Module, Any]:
        import byteps.torch as bps

        wrapped, optimizer = Ddp.wrap(self, model, optimizer, options)
        wrapped.register_comm_hook(options.group, bps.ddp_comm_hook)  # type: ignore[operator]
        return wrapped, optimizer


class C10d(Ddp):
    """DistributedDataParallel in a program without BytePS code: BYTEPS_C10D=1."""

    name = "BYTEPS_C10D"
    sums_belong_to_group = True
    reference = "ddp-gloo"
    references = _WITHOUT_DDP
    through_servers = True
    environment = Served.environment

    def start(self, folder: Path) -> None:
        from byteps import c10d_plugin

        c10d_plugin.install()  # `import torch` does this if the variable is set
        dist.init_process_group("gloo", timeout=TIMEOUT)


class FsdpGloo(Interface):
    """FSDP2 over gloo with a mesh of two dimensions (HSDP): every rank is a host of its own."""

    name = "fsdp2-gloo"
    reference = "fsdp2-gloo"
    ranks_may_differ = False
    _alone: Any = None
    """Group of this rank alone."""

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options = PLAIN
    ) -> tuple[nn.Module, Any]:
        from torch.distributed.fsdp import fully_shard

        mesh = self._mesh(options)
        names = {parameter: name for name, parameter in model.named_parameters()}
        stepped = [names[p] for group in optimizer.param_groups for p in group["params"]]
        sharded: Any = fully_shard(model, mesh=mesh)
        parameters = dict(sharded.named_parameters())
        # FSDP2 has replaced the optimizer's parameters; users update the optimizer like this.
        (group_of_all,) = optimizer.param_groups
        group_of_all["params"] = [parameters[name] for name in stepped]
        return sharded, optimizer

    def _mesh(self, options: Options) -> Any:
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        shape = (dist.get_world_size(), 1)
        if options.group is None:
            return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        if self._alone is None:
            self._alone = [dist.new_group([rank]) for rank in range(shape[0])][dist.get_rank()]
        return DeviceMesh.from_group(
            [options.group, self._alone],
            "cpu",
            mesh=torch.arange(shape[0]).view(shape),
            mesh_dim_names=("replicate", "shard"),
        )

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
    """FSDP2 with BYTEPS_C10D=1: all-reduces over hosts go through servers."""

    name = "FSDP2"
    reference = "fsdp2-gloo"
    references: ClassVar[dict[str, str]] = {}
    through_servers = True
    environment = Served.environment

    def start(self, folder: Path) -> None:
        C10d.start(self, folder)

    def wrap(self, *args: Any, **named: Any) -> tuple[nn.Module, Any]:
        return FsdpGloo.wrap(self, *args, **named)

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        return FsdpGloo.accumulating(self, model)


class ShardedGloo(FsdpGloo):
    """FSDP2 with one dimension, over gloo: each rank has a part of all parameters."""

    name = "fsdp2-sharded-gloo"
    reference = "fsdp2-sharded-gloo"

    def _mesh(self, options: Options) -> Any:
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        if options.group is None:
            return init_device_mesh("cpu", (dist.get_world_size(),))
        return DeviceMesh.from_group(options.group, "cpu")


class Sharded(ShardedGloo, Fsdp):
    """FSDP2 with BYTEPS_FSDP_DTYPES: reduce-scatters go through servers."""

    name = "FSDP2 sharded"
    reference = "fsdp2-sharded-gloo"
    environment: ClassVar[dict[str, str]] = {
        **Served.environment,
        "BYTEPS_FSDP_DTYPES": "same",
    }
