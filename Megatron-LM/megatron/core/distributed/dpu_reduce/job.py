# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""The job that this rank has joined: its hosts, links and replicas.

Each replica has its own torch.distributed world with all parallel groups, and replicas meet only at
the servers. Megatron reduces over the data-parallel ranks of its replica. Then this package reduces
over replicas: gradients by their bucket's operation, a few numbers by :func:`sum_over_replicas`.
BytePS ranks of replica r begin at r times the replica's world size. A rank's peers are the ranks
with the same index in each replica. They hold the same parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from . import bytepslib

if TYPE_CHECKING:
    from argparse import Namespace

    from byteps.torch.world import Job

    from ..distributed_data_parallel import DistributedDataParallel
    from ..param_and_grad_buffer import _ParamAndGradBucket

_job: Job | None = None
_count = 1
"""Number of replicas."""
_peers: tuple[int, ...] = ()
_each_step = True
"""Whether replicas sum the gradients of each step. Otherwise each replica makes its own steps."""
_scaled: weakref.WeakSet[_ParamAndGradBucket] = weakref.WeakSet()
"""Buckets whose gradients are also divided by the number of replicas. The references are weak,
because models may be deleted."""
_size_counts_replicas = False
"""Whether the data-parallel size in the arguments includes the ranks of all replicas."""


def initialize(quorum: str | None = None) -> None:
    """Start BytePS on this rank. Later calls do nothing. Blocks until all ranks call this.

    torch.distributed must be initialized: its ranks are the BytePS workers.

    Args:
        quorum: quorum of replicas, as in ``--dpu-quorum``.

    Raises:
        RuntimeError: BytePS is not installed, or its ranks differ from torch.distributed's.
        byteps.torch.BytePSError: the scheduler or a server cannot be reached, or a rank does not
            call this.
    """
    global _count, _each_step, _job, _peers
    bps = bytepslib.byteps
    if not torch.distributed.is_initialized():
        raise RuntimeError("--use-dpu-reduce: initialise torch.distributed before BytePS")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not bps.is_initialized():
        store = torch.distributed.distributed_c10d._get_default_store()
        bytepslib.world.demand_all(store, rank, size, "--use-dpu-reduce or --dpu-preset")
        local = bytepslib.world.find_place(rank, _gathered)
        bps.init(quorum=quorum, local=local)
        _job = None
    count = bytepslib.session.replicas()
    if (bps.rank(), bps.size()) != (bytepslib.session.first_rank() + rank, size * count):
        raise RuntimeError(
            f"BytePS is worker {bps.rank()} of {bps.size()}, torch.distributed is rank {rank} of "
            f"{size}{f' in each of {count} replicas' if count > 1 else ''}: check RANK and "
            "WORLD_SIZE against DMLC_WORKER_ID and DMLC_NUM_WORKER"
        )
    if _job is None:
        met = bytepslib.world.meet(_gathered)
        # A replica takes the role of a host: its ranks sum among themselves first.
        places = tuple(rank // size for rank in range(size * count))
        _job = met if count == 1 else replace(met, hosts=places, measures=False)
        _count, _each_step = count, True
        # This is always the same object, so that the engine's cache of groups finds it.
        _peers = tuple(range(bytepslib.session.rank() % size, size * count, size))


def forget() -> None:
    """Reset. Ranks exchange everything again when BytePS is restarted."""
    global _count, _each_step, _job, _size_counts_replicas
    _job, _count, _each_step, _size_counts_replicas = None, 1, True, False
    _scaled.clear()


def joined() -> Job:
    """Return the values that ranks have exchanged. Call :func:`initialize` before."""
    assert _job is not None
    return _job


def rank() -> int:
    """Return this rank's number among the workers of all replicas."""
    return bytepslib.byteps.rank()


def ranks_of(group: torch.distributed.ProcessGroup) -> tuple[int, ...]:
    """Return the workers of all replicas that reduce a group's gradients, in the group's order."""
    if replicas() == 1:
        return tuple(torch.distributed.get_process_group_ranks(group))
    size = torch.distributed.get_world_size()
    ranks = torch.distributed.get_process_group_ranks(group)
    return tuple(r + replica * size for replica in range(replicas()) for r in ranks)


def own_ranks_of(group: torch.distributed.ProcessGroup) -> tuple[int, ...]:
    """Return the workers of this replica that reduce a group's gradients."""
    ranks = torch.distributed.get_process_group_ranks(group)
    if replicas() == 1:
        return tuple(ranks)
    first = bytepslib.session.first_rank()
    return tuple(first + r for r in ranks)


def of_this_replica(ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the workers of this replica among the given workers."""
    first = bytepslib.session.first_rank()
    return tuple(r for r in ranks if first <= r < first + torch.distributed.get_world_size())


def _gathered(own: Any) -> list[Any]:
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, own)
    return gathered


def replicas_of(args: Namespace) -> int:
    """Return the number of replicas, from the arguments and the environment.

    Raises:
        byteps.torch.BytePSError: BYTEPS_REPLICA is not NUMBER/COUNT.
    """
    global _size_counts_replicas
    if not getattr(args, "use_dpu_reduce", False):
        return 1
    _size_counts_replicas = True
    return bytepslib.session.replicas()


def demand_arguments() -> None:
    """Check that Megatron's arguments take the number of replicas into account.

    Raises:
        ValueError: there are several replicas, but the arguments ignore them. Batch sizes and
            learning rate would be those of a single replica, and all replicas would read the same
            samples.
    """
    if _count > 1 and not _size_counts_replicas:
        raise ValueError(
            f"BYTEPS_REPLICA={replica()}/{_count} needs Megatron's arguments and data loaders "
            "(megatron.training): they count the data-parallel ranks of all replicas and give each "
            "replica its part of a batch. This program has parsed none, so all replicas would "
            "train on the same samples. Start it by pretrain_gpt.py or another script of "
            "megatron.training, or as one job without BYTEPS_REPLICA"
        )


def replica() -> int:
    """Return the index of this replica."""
    return bytepslib.session.replica()


def replicas() -> int:
    """Return the number of replicas; 1 if BytePS was not started."""
    return _count


def sums_gradients() -> bool:
    """Return whether the gradients of this step are summed over replicas."""
    return _each_step


def leave_each_other() -> None:
    """Make each replica step on its own, from the next step on."""
    global _each_step
    if not _each_step:
        return
    _each_step = False
    for bucket in _scaled:
        bucket.gradient_scaling_factor *= _count


def divide_gradients(ddp: DistributedDataParallel, buckets: Sequence[_ParamAndGradBucket]) -> None:
    """If Megatron divides gradients before it sums them, make it divide by the data-parallel ranks
    of all replicas. (Otherwise the sum is an average already, or the tokens of all replicas are
    counted.)"""
    if _count == 1 or ddp.config.calculate_per_token_loss or ddp.ddp_config.average_in_collective:
        return
    for bucket in buckets:
        bucket.gradient_scaling_factor /= _count
    _scaled.update(buckets)


def peers() -> tuple[int, ...]:
    """Return the BytePS ranks that have this rank's index in each replica."""
    return _peers


def sum_over_replicas(tensor: torch.Tensor, what: str, *, always: bool = False) -> torch.Tensor:
    """Sum a few numbers over replicas, in place. Do nothing if gradients are not summed over
    replicas.

    Args:
        tensor: any type; integers up to 2**53 are summed exactly.
        what: name of the sum. Peers call with the same names in the same order.
        always: sum even if each replica steps on its own.

    Returns:
        the tensor.

    Raises:
        byteps.torch.BytePSError: another replica or a server was lost.
    """
    if _count > 1 and (always or _each_step):
        total = tensor.detach().to("cpu", torch.float64).reshape(-1)
        bps = bytepslib.byteps
        handle = bps.push_pull_async_inplace(
            total,
            average=False,
            name=f"replicas/{what}/{total.numel()}",
            group=peers(),
            in_order=True,  # the order gives the same bits on all peers, and in each run
        )
        bps.synchronize(handle)
        tensor.copy_(total.view(tensor.shape).to(tensor.dtype))
    return tensor


def all_want(wanted: bool, what: str) -> bool:
    """Return whether all present replicas want something; see :func:`sum_over_replicas`."""
    wishes = sum_over_replicas(torch.tensor([float(wanted)]), what, always=True)
    # The sum is scaled up if replicas are absent. But if a present replica does not wish this, the
    # sum is still smaller by at least 1.
    return bool(wishes.item() > _count - 0.5)


def mean_over_replicas(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Average a few numbers over replicas, in place; see :func:`sum_over_replicas`."""
    if _count > 1 and _each_step:
        mean = sum_over_replicas(tensor.double(), what) / _count
        tensor.copy_(mean)
    return tensor


def agreed(value: Any) -> Any:
    """Return the mean over replicas of a number that each replica has computed from the same
    gradients. The mean has the same bits on all replicas, even if their collectives add in
    different orders. A tensor is changed in place."""
    if isinstance(value, torch.Tensor):
        return mean_over_replicas(value, "norm")
    if _count == 1 or not _each_step:
        return value
    return mean_over_replicas(torch.tensor([float(value)], dtype=torch.float64), "norm").item()


def replicas_are_alike(model: Sequence[torch.nn.Module]) -> bool:
    """Return whether this rank and its peers have the same parameters and saved buffers. All ranks
    of all replicas call this.

    Raises:
        byteps.torch.BytePSError: another replica or a server was lost.
    """
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    state = [*parameters, *saved_buffers(model)]
    return bytepslib.members.are_alike(state, "replicas/parameters", peers())


def saved_buffers(model: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the buffers that are part of a checkpoint. These are trained, such as biases of
    routers; other buffers are scratch memory of a step."""
    for chunk in model:
        for module in chunk.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield buffer


def most_inside(facts: Sequence[int]) -> list[int]:
    """Return the maximum of each number over the ranks of this replica."""
    most = torch.tensor(facts, dtype=torch.int64)
    if torch.distributed.get_backend() == "nccl":
        most = most.cuda()
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    maxima: list[int] = most.tolist()
    return maxima
