# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""The job that ranks have joined: its hosts, their links, and its servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from . import bytepslib, replicas

if TYPE_CHECKING:
    from byteps.torch.job import Job

_job: Job | None = None


def initialize() -> None:
    """Start BytePS on this rank, once; later calls do nothing. Blocks until every rank is there.

    torch.distributed must be initialised: its ranks are the BytePS workers.

    Raises:
        RuntimeError: BytePS is missing, or counts its workers differently from torch.distributed.
        byteps.torch.BytePSError: the scheduler or a server cannot be reached.
    """
    global _job
    bps = bytepslib.byteps
    if not torch.distributed.is_initialized():
        raise RuntimeError("--use-dpu-reduce: initialise torch.distributed before BytePS")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not bps.is_initialized():
        bytepslib.hosts.find_place(rank, _told_by_all)
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
        met = bytepslib.job.meet(_told_by_all)
        # To the servers a replica is what a host is otherwise: its ranks sum among themselves
        # first.
        places = tuple(rank // size for rank in range(size * count))
        _job = met if count == 1 else replace(met, hosts=places, measures=False)
        replicas.begin()


def forget() -> None:
    """Ask all ranks anew when BytePS starts again."""
    global _job
    _job = None
    replicas.forget()


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
    if replicas.count() == 1:
        return tuple(torch.distributed.get_process_group_ranks(group))
    size = torch.distributed.get_world_size()
    ranks = torch.distributed.get_process_group_ranks(group)
    return tuple(r + replica * size for replica in range(replicas.count()) for r in ranks)


def own_ranks_of(group: torch.distributed.ProcessGroup) -> tuple[int, ...]:
    """Of these the ones of this replica."""
    ranks = torch.distributed.get_process_group_ranks(group)
    if replicas.count() == 1:
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
