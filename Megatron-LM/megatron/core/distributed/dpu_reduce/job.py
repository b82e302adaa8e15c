# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""The job that ranks have joined, its hosts and links, and the replicas that train one model in it.

Each replica has a torch.distributed world of its own, of which all parallel groups are, and
replicas meet only at the servers. What Megatron does over the data-parallel ranks it does inside
the replica, and then this package over replicas: gradients by their bucket's operation, a few
numbers by :func:`sum_over_replicas`. Workers of replica r are the BytePS ranks from r times the
replica's world size on. So a rank's peers, which hold the same parameters, are those of its own
place in each replica.
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
"""Replicas."""
_peers: tuple[int, ...] = ()
_each_step = True
"""Whether replicas sum the gradients of each step; otherwise each steps by itself."""
_scaled: weakref.WeakSet[_ParamAndGradBucket] = weakref.WeakSet()
"""Buckets whose gradients are divided by the number of replicas too, while their models live."""
_size_counts_replicas = False
"""Whether the arguments' data-parallel size counts the ranks of all replicas."""


def initialize(quorum: str | None = None) -> None:
    """Start BytePS on this rank, once; later calls do nothing. Blocks until every rank is there.

    torch.distributed must be initialised: its ranks are the BytePS workers.

    Args:
        quorum: of replicas, as in ``--dpu-quorum``.

    Raises:
        RuntimeError: BytePS is missing, or counts its workers differently from torch.distributed.
        byteps.torch.BytePSError: the scheduler or a server cannot be reached.
    """
    global _count, _each_step, _job, _peers
    bps = bytepslib.byteps
    if not torch.distributed.is_initialized():
        raise RuntimeError("--use-dpu-reduce: initialise torch.distributed before BytePS")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not bps.is_initialized():
        local = bytepslib.world.find_place(rank, _told_by_all)
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
        met = bytepslib.world.meet(_told_by_all)
        # To the servers a replica is what a host is otherwise: its ranks sum among themselves
        # first.
        places = tuple(rank // size for rank in range(size * count))
        _job = met if count == 1 else replace(met, hosts=places, measures=False)
        _count, _each_step = count, True
        # One object, by which the engine knows the group again.
        _peers = tuple(range(bytepslib.session.rank() % size, size * count, size))


def forget() -> None:
    """Ask all ranks anew when BytePS starts again."""
    global _count, _each_step, _job, _size_counts_replicas
    _job, _count, _each_step, _size_counts_replicas = None, 1, True, False
    _scaled.clear()


def joined() -> Job:
    """What was told. Only after :func:`initialize`."""
    assert _job is not None
    return _job


def rank() -> int:
    """This rank's number among the workers of the job, all replicas counted."""
    return bytepslib.byteps.rank()


def ranks_of(group: torch.distributed.ProcessGroup) -> tuple[int, ...]:
    """The workers that reduce a group's gradients, in its order: its global ranks, in each
    replica."""
    if replicas() == 1:
        return tuple(torch.distributed.get_process_group_ranks(group))
    size = torch.distributed.get_world_size()
    ranks = torch.distributed.get_process_group_ranks(group)
    return tuple(r + replica * size for replica in range(replicas()) for r in ranks)


def own_ranks_of(group: torch.distributed.ProcessGroup) -> tuple[int, ...]:
    """Of these the ones of this replica."""
    ranks = torch.distributed.get_process_group_ranks(group)
    if replicas() == 1:
        return tuple(ranks)
    first = bytepslib.session.first_rank()
    return tuple(first + r for r in ranks)


def of_this_replica(ranks: Sequence[int]) -> tuple[int, ...]:
    """Of these workers of the job the ones of this replica."""
    first = bytepslib.session.first_rank()
    return tuple(r for r in ranks if first <= r < first + torch.distributed.get_world_size())


def _told_by_all(mine: Any) -> list[Any]:
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, mine)
    return told


def replicas_of(args: Namespace) -> int:
    """How many replicas train the model, by the arguments and the environment.

    Raises:
        byteps.torch.BytePSError: BYTEPS_REPLICA is not NUMBER/COUNT.
    """
    global _size_counts_replicas
    if not getattr(args, "use_dpu_reduce", False):
        return 1
    _size_counts_replicas = True
    return bytepslib.session.replicas()


def demand_arguments() -> None:
    """Check that Megatron's arguments have asked how many replicas there are.

    Raises:
        ValueError: there are several, and none of them has asked: batch sizes and the learning rate
            are those of one replica, and all replicas read the same samples.
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
    """Which of them this is."""
    return bytepslib.session.replica()


def replicas() -> int:
    """How many train the model. 1 where BytePS was not started."""
    return _count


def sums_gradients() -> bool:
    """Whether the gradients of this step are summed over replicas."""
    return _each_step


def leave_each_other() -> None:
    """From the next step on each replica steps by itself."""
    global _each_step
    if not _each_step:
        return
    _each_step = False
    for bucket in _scaled:
        bucket.gradient_scaling_factor *= _count


def divide_gradients(ddp: DistributedDataParallel, buckets: Sequence[_ParamAndGradBucket]) -> None:
    """Have Megatron divide gradients by the data-parallel ranks of all replicas, where it divides
    before it sums. Otherwise the sum is an average already, or the tokens of all are counted."""
    if _count == 1 or ddp.config.calculate_per_token_loss or ddp.ddp_config.average_in_collective:
        return
    for bucket in buckets:
        bucket.gradient_scaling_factor /= _count
    _scaled.update(buckets)


def peers() -> tuple[int, ...]:
    """BytePS ranks of this rank's place in each replica."""
    return _peers


def sum_over_replicas(tensor: torch.Tensor, what: str, *, always: bool = False) -> torch.Tensor:
    """Sum a few numbers over replicas, in place, where gradients are summed over them too.

    Args:
        tensor: of any type; numbers up to 2**53 are summed exactly.
        what: names the sum: ranks of one place call with the same in the same order.
        always: also where each replica steps by itself.

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
            in_order=True,  # the same bits at each place, and in each run
        )
        bps.synchronize(handle)
        tensor.copy_(total.view(tensor.shape).to(tensor.dtype))
    return tensor


def all_want(wanted: bool, what: str) -> bool:
    """Whether all replicas that are there want something; see :func:`sum_over_replicas`."""
    wishes = sum_over_replicas(torch.tensor([float(wanted)]), what, always=True)
    # Scaled, where some are missing: less by more than one if any of the others does not want it.
    return bool(wishes.item() > _count - 0.5)


def mean_over_replicas(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Average a few numbers over replicas, in place; see :func:`sum_over_replicas`."""
    if _count > 1 and _each_step:
        mean = sum_over_replicas(tensor.double(), what) / _count
        tensor.copy_(mean)
    return tensor


def agreed(value: Any) -> Any:
    """Mean of a number that each replica has computed from the same gradients: the same bits in all
    of them, whatever order their collectives add in. A tensor is changed in place."""
    if isinstance(value, torch.Tensor):
        return mean_over_replicas(value, "norm")
    if _count == 1 or not _each_step:
        return value
    return mean_over_replicas(torch.tensor([float(value)], dtype=torch.float64), "norm").item()


def replicas_are_alike(model: Sequence[torch.nn.Module]) -> bool:
    """Whether this rank and its peers have the same parameters and saved buffers. All ranks of all
    replicas call this.

    Raises:
        byteps.torch.BytePSError: another replica or a server was lost.
    """
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    state = [*parameters, *saved_buffers(model)]
    return bytepslib.members.are_alike(state, "replicas/parameters", peers())


def saved_buffers(model: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Buffers that are part of a checkpoint, as the biases of routers are: they are trained. Others
    are scratch memory of a step."""
    for chunk in model:
        for module in chunk.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield buffer


def most_inside(facts: Sequence[int]) -> list[int]:
    """Takes the maximum of each number over the ranks of this replica."""
    most = torch.tensor(facts, dtype=torch.int64)
    if torch.distributed.get_backend() == "nccl":
        most = most.cuda()
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    found: list[int] = most.tolist()
    return found
