"""Becoming a worker of the job when torch.distributed starts, and knowing the others."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from byteps.launcher import meeting
from byteps.torch import session
from byteps.torch.figures import setting
from byteps.torch.job import Job, Told, meet

_job: tuple[int, Job] | None = None
"""With the number of the session that it belongs to."""


def join(store: Any, rank: int, size: int) -> Job:
    """Join the job, and learn the hosts of all its workers; all ranks call this.

    Args:
        store: of torch.distributed, with nobody's prefix.
        rank: of this process in torch.distributed; its worker's rank must be the same.
        size: ranks of torch.distributed.

    Raises:
        BytePSError: the scheduler or a server cannot be reached, or ranks are counted differently.
    """
    global _job
    session.init(store=store)
    if (session.rank(), session.size()) != (rank, size):
        raise session.BytePSError(
            f"BytePS is worker {session.rank()} of {session.size()}, torch.distributed is rank "
            f"{rank} of {size}: check RANK and WORLD_SIZE against DMLC_WORKER_ID and "
            "DMLC_NUM_WORKER"
        )
    if _job is None or _job[0] != session.number():
        deadline = time.monotonic() + float(setting("BYTEPS_START_TIMEOUT_S"))
        told = meet(lambda mine: _exchange(store, rank, size, mine, deadline))
        _job = session.number(), told
    return _job[1]


def joined() -> Job:
    """What `join` learned, or is learned now where torch.distributed's ranks all come here.

    Raises:
        BytePSError: see `join`.
    """
    if _job is not None and session.is_initialized() and _job[0] == session.number():
        return _job[1]
    return join(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())


def _exchange(store: Any, rank: int, size: int, mine: Told, deadline: float) -> Sequence[Told]:
    """What each rank told, in order. Rank 0 reads all and writes it once, so that a large job
    reads two values a rank."""
    if size == 1:
        return [mine]
    try:
        prefix = meeting.meet(store, "c10d", rank, size, deadline)
    except meeting.AbsentError as error:
        raise session.BytePSError(
            f"ranks {error.members} did not come to tell their hosts (BYTEPS_START_TIMEOUT_S)"
        ) from None
    store.set(f"{prefix}/told/{rank}", json.dumps(mine))
    everything = f"{prefix}/told"
    if rank == 0:
        keys = [f"{prefix}/told/{other}" for other in range(size)]
        if meeting.wait_for(store, keys, deadline):
            told = [json.loads(text) for text in store.multi_get(keys)]
            store.set(everything, json.dumps(told))
    if not meeting.wait_for(store, [everything], deadline):
        raise session.BytePSError("ranks did not tell their hosts (BYTEPS_START_TIMEOUT_S)")
    return [Told(*one) for one in json.loads(store.get(everything))]
