# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Checkpoints that one replica saves for all.

All replicas come to a save at the same iteration. They ask by one small sum which of them are there
now: any of them may have been lost in the step before, or be about to leave. The first one that
stays saves, while the others wait for it, and a second sum says whether it has. If it was lost in
between, the next one saves. So a job that goes on, or ends with status 0, has the checkpoint.

With ``--async-save`` the second sum says that the save has begun. What has become of the last one
is asked when training ends.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import bytepslib, job, lost_samples, outer_steps


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """A checkpoint that a replica writes in the background."""

    saver: int
    iteration: int
    folder: str


_begun: _Begun | None = None
"""The last one; None: it is known to be written."""


def forget() -> None:
    """This process saves no more for others."""
    global _begun
    _begun = None


def save_once(
    save: Callable[[], None],
    args: Namespace,
    model: Sequence[Any],
    iteration: int,
    *,
    stays: bool,
) -> None:
    """Have one replica save a checkpoint. All ranks of all replicas call this.

    Args:
        save: saves the checkpoint of this replica, on all of its ranks.
        args: Megatron's.
        model: chunks.
        iteration: how many are done.
        stays: whether this replica trains on. One that leaves saves only if all do.

    Raises:
        RuntimeError: the replicas have parted.
        byteps.torch.BytePSError: this replica was removed, or a server was lost.
    """
    global _begun
    outer_steps.before_save(model)
    missing = lost_samples.take_missing()
    if not job.replicas_are_alike(model):
        raise RuntimeError(
            "--use-dpu-reduce: the replicas' parameters or buffers have become different, though "
            "each was given the same sums: their GPUs or layouts are not alike, or one of them has "
            "changed its model by itself. No checkpoint was saved."
        )
    saver = -1
    while saver < 0:
        present, staying = _who_is_here(stays)
        lost_samples.tell(args, missing, present)
        missing = set()
        saver = (staying if any(staying) else present).index(True)
        if saver == job.replica():
            outer_steps.save(args, iteration)
            save()
        if not _has_done("saved", saver):
            saver = -1  # it was lost: the next one saves
    if getattr(args, "async_save", False):
        _begun = _Begun(saver=saver, iteration=iteration, folder=args.save)
    bytepslib.members.take_missing()  # of these sums, which are of no step


def demand_written() -> None:
    """Training ends, and this replica's checkpoints are written. All ranks of all replicas that are
    left call this.

    Raises:
        RuntimeError: the last checkpoint was not written: the replica that did it was lost.
    """
    global _begun
    begun, _begun = _begun, None
    if begun is None or _has_done("written", begun.saver):
        return
    if not _names(begun.folder, begun.iteration):
        raise RuntimeError(
            f"--use-dpu-reduce: replica {begun.saver}, which wrote the checkpoint of iteration "
            f"{begun.iteration} in the background (--async-save), was lost before it was complete: "
            f"{begun.folder} ends with the one before"
        )


def finish() -> None:
    """Wait for a checkpoint of this replica that is being written, and ask nobody else."""
    forget()
    finalize = getattr(
        sys.modules.get("megatron.training.async_utils"), "maybe_finalize_async_save", None
    )
    if finalize is not None:
        finalize(blocking=True, terminate=True)


def _names(folder: str, iteration: int) -> bool:
    """Whether a folder of checkpoints names this one as the last, as Megatron does once it is
    complete."""
    try:
        with open(os.path.join(folder, "latest_checkpointed_iteration.txt")) as file:
            return file.read().strip() == str(iteration)
    except OSError:
        return False


def _who_is_here(stays: bool) -> tuple[list[bool], list[bool]]:
    """The replicas that are present, and those that stay; the same on all ranks of all replicas."""
    count = job.replicas()
    mine = torch.zeros(2 * count, dtype=torch.float64)
    mine[job.replica()] = 1
    mine[count + job.replica()] = stays
    found = _summed(mine, "here")
    return found[:count], found[count:]


def _has_done(what: str, replica: int) -> bool:
    """Whether a replica, all of whose ranks have come here, was not lost before; the same on all
    ranks of all of them."""
    mine = torch.zeros(job.replicas(), dtype=torch.float64)
    mine[job.replica()] = 1
    return _summed(mine, what)[replica]


def _summed(mine: torch.Tensor, what: str) -> list[bool]:
    """Where the sums of these over replicas, one of each rank and its peers, are all not 0. Servers
    wait for a save as long as it takes; collectives inside a replica would not."""
    job.sum_over_replicas(mine, f"save/{what}", always=True)
    return [not lacks for lacks in job.most_inside((mine == 0).int().tolist())]
