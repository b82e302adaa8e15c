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

from collections.abc import Sequence
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
_present: tuple[bool, ...] = ()
"""Which replicas the last sum over all of them was made of, by number; the same on all of them."""
_scaled: list[_ParamAndGradBucket] = []
"""Those whose gradients are divided by the number of replicas too."""


def initialize() -> None:
    """Start BytePS on this rank, once; later calls do nothing. Blocks until every rank is there.

    torch.distributed must be initialised: its ranks are the BytePS workers.

    Raises:
        RuntimeError: BytePS is missing, or counts its workers differently from torch.distributed.
        byteps.torch.BytePSError: the scheduler or a server cannot be reached.
    """
    global _count, _each_step, _job, _peers, _present
    bps = bytepslib.byteps
    if not torch.distributed.is_initialized():
        raise RuntimeError("--use-dpu-reduce: initialise torch.distributed before BytePS")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not bps.is_initialized():
        bytepslib.world.find_place(rank, _told_by_all)
        bps.init()
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
        _count, _each_step, _present = count, True, (True,) * count
        # One object, by which the engine knows the group again.
        _peers = tuple(range(bytepslib.session.rank() % size, size * count, size))


def forget() -> None:
    """Ask all ranks anew when BytePS starts again."""
    global _count, _each_step, _job
    _job, _count, _each_step = None, 1, True
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
    if not getattr(args, "use_dpu_reduce", False):
        return 1
    return bytepslib.session.replicas()


def replica() -> int:
    """Which of them this is."""
    return bytepslib.session.replica()


def replicas() -> int:
    """How many train the model. 1 where BytePS was not started."""
    return _count


def present() -> tuple[bool, ...]:
    """Which replicas take part, as all of them have last found together."""
    return _present


def set_present(now: Sequence[bool]) -> None:
    """All replicas have found together which of them take part."""
    global _present
    _present = tuple(now)


def is_first_replica() -> bool:
    """Whether this replica is the first that takes part: it does what one does for all."""
    return replica() == _present.index(True)


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
    _scaled.extend(buckets)


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
        bytepslib.byteps.push_pull_inplace(
            total, average=False, name=f"replicas/{what}/{total.numel()}", group=peers()
        )
        tensor.copy_(total.view(tensor.shape).to(tensor.dtype))
    return tensor


def all_want(wanted: bool, what: str) -> bool:
    """Whether all replicas that are there want something; see :func:`sum_over_replicas`."""
    wishes = sum_over_replicas(torch.tensor([float(wanted)]), what, always=True)
    # Scaled, where some are missing: less by more than one if any of the others does not want it.
    return bool(wishes.item() > _count - 0.5)


def agreed(value: Any) -> Any:
    """A number that each replica has computed from the same gradients: the mean, the same bits in
    all of them, whatever order their collectives add in. A tensor is changed in place."""
    if _count == 1 or not _each_step:
        return value
    if isinstance(value, torch.Tensor):
        mean = value.double()
        return value.copy_(sum_over_replicas(mean, "norm") / _count)
    mean = torch.tensor([float(value)], dtype=torch.float64)
    return (sum_over_replicas(mean, "norm") / _count).item()


def replicas_are_alike(model: Sequence[torch.nn.Module]) -> bool:
    """Whether this rank and its peers have the same parameters. All ranks of all replicas call
    this.

    Raises:
        byteps.torch.BytePSError: another replica or a server was lost.
    """
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    return bytepslib.members.are_alike(parameters, "replicas/parameters", peers())
