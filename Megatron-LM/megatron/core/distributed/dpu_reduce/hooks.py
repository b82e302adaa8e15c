# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Hooks that Megatron calls. The package's docstring has the rule for them."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import (
    bytepslib,
    job,
    outer_steps,
    plan,
    replica_changes,
    replica_state,
    saves,
    server_buckets,
    step_log,
    summed_later,
    sums,
)
from .refusal import FEW_BITS

if TYPE_CHECKING:
    from ...transformer.transformer_config import TransformerConfig
    from ..distributed_data_parallel import DistributedDataParallel
    from ..param_and_grad_buffer import _ParamAndGradBucketGroup


def initialize(args: Namespace | None = None) -> None:
    """Start BytePS on this rank, once. torch.distributed is initialized. Blocks until all ranks
    call this.

    Args:
        args: Megatron's arguments, which have the flag; None: start BytePS in any case.

    Raises:
        RuntimeError: BytePS is not installed, or its ranks differ from torch.distributed's.
        byteps.torch.BytePSError: the scheduler or a server cannot be reached.
    """
    if args is not None and not getattr(args, "use_dpu_reduce", False):
        return
    job.initialize(getattr(args, "dpu_quorum", None))
    if args is not None and job.replicas() > 1:
        replica_changes.wait_for_training(args)


def separate_buffers(
    ddp: DistributedDataParallel,
    buffers: summed_later.Buffers,
    names: Mapping[torch.nn.Parameter, str],
    config: TransformerConfig,
) -> summed_later.Buffers:
    """Move some parameters to separate buffers, after DDP has grouped them: see
    :func:`.summed_later.separate_buffers`."""
    if not ddp.ddp_config.dpu_optimizer:
        return buffers
    return summed_later.separate_buffers(ddp, buffers, names, config)


def register(ddp: DistributedDataParallel) -> None:
    """Plan the buckets of a new DDP: see :func:`.plan.register`."""
    if ddp.ddp_config.use_dpu_reduce:
        plan.register(ddp)


def reduces(bucket_group: _ParamAndGradBucketGroup) -> bool:
    """Return whether BytePS sums the bucket group. If not, Megatron issues its own collectives."""
    if not bucket_group.ddp_config.use_dpu_reduce:
        return False
    return server_buckets.are_updated(bucket_group) or sums.goes_through_servers(bucket_group)


def start_grad_sync(
    bucket_group: _ParamAndGradBucketGroup, force_all_reduce: bool | None = False
) -> sums.GradSyncHandle | None:
    """Sum a ready bucket group that BytePS `reduces`: see :func:`.sums.start_grad_sync`, or
    :func:`.server_buckets.start_update` if servers update it."""
    if server_buckets.are_updated(bucket_group):
        return server_buckets.start_update(bucket_group)
    return sums.start_grad_sync(bucket_group, force_all_reduce)


def outer_reduction(config: Any, group: torch.distributed.ProcessGroup) -> sums.OuterReduction:
    """Return the all-reduce of Megatron-FSDP's shards over replicas: see
    :class:`.OuterReduction`."""
    return sums.OuterReduction(config, group)


def outside_graph(call: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a call that records a forward and backward pass in a CUDA graph, or replays it: see
    :mod:`.sums`. Its keywords include ``model`` and ``forward_only``."""

    @functools.wraps(call)
    def wrapped(self: object, *args: Any, **kwargs: Any) -> Any:
        model = kwargs.get("model")
        if kwargs.get("forward_only") or not sums.are_summed_outside(model):
            return call(self, *args, **kwargs)
        chunks = model if isinstance(model, list) else [model]
        return sums.run(lambda: call(self, *args, **kwargs), chunks)

    return wrapped


def keeps_optimizer(model_chunks: Sequence[Any]) -> bool:
    """Return whether servers keep the optimizer of these model chunks."""
    config = getattr(model_chunks[0], "ddp_config", None)
    return bool(getattr(config, "dpu_optimizer", False))


def make_server_optimizer(*arguments: Any) -> Any:
    """Call :func:`.server_making.make_server_optimizer`; only valid if `keeps_optimizer`. That
    module is imported here, because it needs ``megatron.core``'s optimizers, which import this
    package."""
    from .server_making import make_server_optimizer as make

    return make(*arguments)


def gradients_will_be_zeroed(ddp: DistributedDataParallel) -> None:
    """Prepare for DDP's zeroing of its gradients. With ``dpu_optimizer``, if Megatron repeats a
    step, servers may still be sending parameters into that memory.

    Raises:
        byteps.torch.BytePSError: a rank or a server was lost.
    """
    if ddp.ddp_config.dpu_optimizer:
        server_buckets.forget_pushes(ddp)
    elif ddp.ddp_config.dpu_reduce_wire_dtype in FEW_BITS:
        # The import is here, because megatron.core imports this package.
        from ...rerun_state_machine import RerunState, get_rerun_state_machine

        if get_rerun_state_machine().state == RerunState.RERUNNING_IN_PLACE:
            bytepslib.wire.feedback.drop()  # the gradients are computed anew


def add_checkpoint_metadata(args: Namespace, metadata: dict[str, Any]) -> None:
    """Add the form of the servers' state to the metadata of a checkpoint that is saved or loaded
    next. Drop rounding losses if the checkpoint format cannot hold them."""
    if args.ckpt_format != "torch_dist":
        _forget_lost(args)
    if getattr(args, "dpu_optimizer", False):
        # The import is here, because megatron.core imports this package.
        from .server_checkpoint import put_metadata

        wait_for_parameters()
        put_metadata(metadata)


def save_feedback(args: Namespace, state: dict[str, Any]) -> None:
    """Add rounding losses to a state that is about to be saved: see :mod:`.feedback_state`. Drop
    the losses if the checkpoint cannot hold them, so that this job computes the same bits as a
    resumed one."""
    if getattr(args, "dpu_reduce_wire_dtype", None) not in FEW_BITS:
        return
    if args.no_save_optim or job.replicas() > 1:
        return _forget_lost(args)
    # The import is here, because megatron.core imports this package.
    from .feedback_state import save

    save(state, per_rank=getattr(args, "dpu_feedback_per_rank", False))


def ask_for_feedback(
    args: Namespace, state: dict[str, Any], common: Mapping[str, Any] | None
) -> None:
    """Request rounding losses from a checkpoint that is about to be loaded. `common`: common part
    of the checkpoint; None without a checkpoint."""
    if common is None or not _resumes_feedback(args) or job.replicas() > 1:
        return
    from .feedback_state import ask

    ask(state, common)


def state_is_loaded(args: Namespace, state: dict[str, Any]) -> None:
    """Take over the rounding losses of a loaded state, or drop them. With
    ``--use-checkpoint-opt_param-scheduler`` the optimizer on the servers also takes its rates from
    that state."""
    if getattr(args, "dpu_optimizer", False) and args.use_checkpoint_opt_param_scheduler:
        # The import is here, because megatron.core imports this package.
        from .server_checkpoint import keep_rates

        keep_rates(state.get("optimizer"))
    _forget_lost(args)
    if not _resumes_feedback(args):
        return
    from .feedback_state import has_feedback, take

    if not take(state) and has_feedback() and torch.distributed.get_rank() == 0:
        print(
            "--dpu-reduce-wire-dtype: the checkpoint does not say what rounding has lost: the "
            "first step goes without feedback",
            flush=True,
        )


def _resumes_feedback(args: Namespace) -> bool:
    few = getattr(args, "dpu_reduce_wire_dtype", None) in FEW_BITS
    return few and not args.finetune and not args.no_load_optim


def step_ended(args: Namespace, successful: bool) -> None:
    """Handle the end of a step. If all ranks have skipped it, drop rounding losses, because they
    belong to discarded gradients. An outer step may be due."""
    if not successful:
        _forget_lost(args)
    outer_steps.iteration_ended(args)


def replicas_of(args: Namespace) -> int:
    """Return the number of replicas. Each has an equal part of the data-parallel ranks."""
    return job.replicas_of(args)


def training_begins(args: Namespace, model: Sequence[Any], optimizer: Any) -> None:
    """Prepare for the first step. Model and optimizer already have their initial values, or those
    of a checkpoint. Replicas then begin together (:func:`.outer_steps.begin`). From now on SIGTERM
    makes this replica leave the job."""
    if getattr(args, "use_dpu_reduce", False):
        step_log.begin(args)
    if job.replicas() == 1:
        return outer_steps.begin(args, model, optimizer)
    if not bytepslib.members.is_late():
        outer_steps.begin(args, model, optimizer)
        for server_optimizer in replica_state.kept_by_servers(outer_steps.inner(optimizer)):
            server_optimizer.begin_with_others()
    replica_changes.listen(args)


def leaves_out_step(args: Namespace, data: Any, scheduler: Any) -> bool:
    """Return whether this iteration is skipped: see `.outer_steps.leaves_out`."""
    return job.replicas() > 1 and outer_steps.leaves_out(args, data, scheduler)


def serialize_dataset_builds(build: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that builds datasets and caches their indices in files. Replica 0 builds
    first. Then the other replicas, which may share the files, read them."""

    @functools.wraps(build)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if job.replicas() == 1 or bytepslib.members.is_late():
            return build(*args, **kwargs)
        last = job.replica() > 0
        if last:
            job.sum_over_replicas(torch.zeros(1), "datasets", always=True)
        try:
            return build(*args, **kwargs)
        finally:
            if not last:
                job.sum_over_replicas(torch.zeros(1), "datasets", always=True)

    return wrapped


def sum_over_replicas(tensor: torch.Tensor, what: str, *, always: bool = False) -> torch.Tensor:
    """Sum a few numbers over replicas: see :func:`.job.sum_over_replicas`. Data-parallel ranks of
    this replica have summed them before."""
    return job.sum_over_replicas(tensor, what, always=always)


def agreed_norm(norm: Any) -> Any:
    """Make the gradient norm equal on all replicas: see :func:`.job.agreed`."""
    return job.agreed(norm)


def mean_over_replicas(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Average a few numbers over replicas: see :func:`.job.mean_over_replicas`. Data-parallel ranks
    of this replica have averaged them before."""
    return job.mean_over_replicas(tensor, what)


def told_to_end(args: Namespace, received: Iterable[Any]) -> bool:
    """Return whether the job ends because of a signal.

    Args:
        received: for each rank of this replica, whether it received the signal. With replicas, the
            job ends if all replicas received it. Otherwise only the replicas that received it
            leave.
    """
    any_received = any(received)
    if job.replicas() == 1 or not outer_steps.meets(args):
        return any_received and job.replicas() == 1
    return job.all_want(replica_changes.wants_to_end(any_received), "signals")


def wanted_by_any(args: Namespace, flag: torch.Tensor, what: str) -> torch.Tensor:
    """Return a non-zero flag if any rank of any replica wants to end the job. The result is 0 at
    iterations after which replicas do not meet, because they cannot agree then. `flag` is changed
    in place.
    """
    if job.replicas() == 1:
        return flag
    if not outer_steps.meets(args):
        return flag.zero_()
    return job.sum_over_replicas(flag, what, always=True)


def saved_once(save: Callable[..., None]) -> Callable[..., None]:
    """Decorate a function that saves a checkpoint. Only one replica then saves: see
    :mod:`.saves`."""

    @functools.wraps(save)
    def wrapped(iteration: int, model: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        # The import is here, because megatron.training calls the decorated function.
        from megatron.training.global_vars import get_args

        def saves_this() -> None:
            save(iteration, model, *args, **kwargs)

        if job.replicas() == 1:
            outer_steps.before_save()
            outer_steps.save(get_args(), iteration)
            return saves_this()
        stays = not replica_changes.leaves()
        return saves.save_once(saves_this, get_args(), model, iteration, stays=stays)

    return wrapped


def of_outer_parameters(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that evaluates the model, so that it finds the outer parameters."""

    @functools.wraps(evaluate)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with outer_steps.outer_parameters():
            return evaluate(*args, **kwargs)

    return wrapped


def saves_are_written() -> None:
    """Check at the end of training that this process's checkpoints were written: see
    :mod:`.saves`."""
    if job.replicas() > 1:
        saves.demand_written()


def write_metrics(args: Namespace, iteration: int, writer: Any, wandb_writer: Any) -> None:
    """Write metrics next to Megatron's own: see :mod:`.step_log`."""
    if getattr(args, "use_dpu_reduce", False):
        step_log.write(args, iteration, writer, wandb_writer)


def model_is_built(args: Namespace, model: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
    """Join a running job, if this replica is late: see :func:`.replica_changes.join`. Datasets are
    built afterwards."""
    if job.replicas() > 1:
        replica_changes.join(args, model, optimizer, scheduler)


def iteration_ended(
    args: Namespace,
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    iteration: int,
    operations: float,
) -> None:
    """Handle the end of an iteration: see :func:`.replica_changes.change_replicas`."""
    if job.replicas() == 1:
        return
    replica_changes.change_replicas(args, model, optimizer, scheduler, iteration, operations)
    if iteration == args.train_iters:
        replica_changes.forget()


def _forget_lost(args: Namespace) -> None:
    if getattr(args, "dpu_reduce_wire_dtype", None) in FEW_BITS:
        bytepslib.wire.feedback.drop()


def wait_for_parameters() -> None:
    """Block until models have all parameters of the last step. Needed with
    ``dpu_optimizer_overlap``: custom training loops call this before they read parameters outside a
    forward pass.

    Raises:
        byteps.torch.BytePSError: parameters did not arrive.
        RuntimeError: a rank of this host was lost.
    """
    machines = sys.modules.get("byteps.torch.step_machine")
    if machines is not None:
        machines.wait_for_parameters()


def shutdown(args: Namespace | None = None) -> None:
    """Leave the BytePS job at the end of training, if this process is in it. Does not wait for
    other ranks. May be called more than once, and if BytePS was never started.

    Args:
        args: Megatron's arguments, which have the flag; None: leave in any case.
    """
    if args is not None and not getattr(args, "use_dpu_reduce", False):
        return
    wait_for_parameters()
    plan.forget()
    sums.forget()
    outer_steps.forget()
    replica_changes.forget()
    saves.forget()
    nodes = sys.modules.get("byteps.torch.nodes")
    if nodes is not None:
        nodes.groups.forget()
    bps = sys.modules.get("byteps.torch")
    if bps is not None and bps.is_initialized():
        bps.shutdown()
