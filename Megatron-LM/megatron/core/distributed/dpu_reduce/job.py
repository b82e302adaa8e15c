# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""The job that ranks have joined: its hosts, their links, and its servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import bytepslib

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
    if not bps.is_initialized():
        bps.init()
        _job = None
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if (bps.rank(), bps.size()) != (rank, size):
        raise RuntimeError(
            f"BytePS is worker {bps.rank()} of {bps.size()}, torch.distributed is rank {rank} of "
            f"{size}: check RANK and WORLD_SIZE against DMLC_WORKER_ID and DMLC_NUM_WORKER"
        )
    if _job is None:
        _job = bytepslib.job.meet(_told_by_all)


def forget() -> None:
    """Ask all ranks anew when BytePS starts again."""
    global _job
    _job = None


def joined() -> Job:
    """What was told. Only after :func:`initialize`."""
    assert _job is not None
    return _job


def ranks_of(group: torch.distributed.ProcessGroup) -> tuple[int, ...]:
    """The global ranks of a group, in its order."""
    return tuple(torch.distributed.get_process_group_ranks(group))


def _told_by_all(mine: Any) -> list[Any]:
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, mine)
    return told
