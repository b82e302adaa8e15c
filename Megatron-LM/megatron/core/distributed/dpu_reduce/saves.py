# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Lets one replica save a checkpoint for all.

All replicas save at the same iteration. First a small sum shows which replicas are present and
stay, because a replica may have been lost in the last step, or be about to leave. The first replica
that stays saves while the others wait. A second sum shows whether the save has succeeded. If the
saving replica was lost, the next replica saves. So a job that continues, or ends with status 0, has
the checkpoint.

With ``--async-save`` the second sum only shows that the save has begun. The end of training checks
that the last checkpoint was written.
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
    """Checkpoint that a replica writes in the background."""

    saver: int
    iteration: int
    folder: str


_begun: _Begun | None = None
"""The checkpoint that was begun last; None if it is known to be complete."""


def forget() -> None:
    """Reset. This process no longer saves for other replicas."""
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
        save: function that saves the checkpoint of this replica, on all of its ranks.
        args: Megatron's arguments.
        model: chunks of the model.
        iteration: number of completed iterations.
        stays: whether this replica goes on training. A replica that leaves saves only if all leave.

    Raises:
        RuntimeError: the replicas have diverged.
        byteps.torch.BytePSError: this replica was removed, or a server was lost.
    """
    global _begun
    outer_steps.before_save()
    missing = lost_samples.take_missing()
    if not job.replicas_are_alike(model):
        raise RuntimeError(
            "--use-dpu-reduce: the replicas' parameters or buffers differ, although each replica "
            "was given the same sums. Their GPUs or layouts are not alike, or the program of one "
            "replica has changed its model. No checkpoint was saved."
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
            saver = -1  # The saving replica was lost, so the next one saves.
    if getattr(args, "async_save", False):
        _begun = _Begun(saver=saver, iteration=iteration, folder=args.save)
    # Replicas that these sums have lacked are cleared, because the sums belong to no step.
    bytepslib.members.take_missing()


def demand_written() -> None:
    """Check at the end of training that the last checkpoint was written. All ranks of all remaining
    replicas call this when their own checkpoints are written.

    Raises:
        RuntimeError: the last checkpoint was not written, because the saving replica was lost.
    """
    global _begun
    begun, _begun = _begun, None
    if begun is None or _has_done("written", begun.saver):
        return
    if not _names(begun.folder, begun.iteration):
        raise RuntimeError(
            f"--use-dpu-reduce: replica {begun.saver} was lost while it wrote the checkpoint of "
            f"iteration {begun.iteration} in the background (--async-save). The newest complete "
            f"checkpoint in {begun.folder} is an earlier one"
        )


def finish() -> None:
    """Wait until this replica has written its checkpoint. This makes no sum over replicas."""
    forget()
    finalize = getattr(
        sys.modules.get("megatron.training.async_utils"), "maybe_finalize_async_save", None
    )
    if finalize is not None:
        finalize(blocking=True, terminate=True)


def _names(folder: str, iteration: int) -> bool:
    """Return whether a folder names this checkpoint as its last one. Megatron writes the name when
    the checkpoint is complete."""
    try:
        with open(os.path.join(folder, "latest_checkpointed_iteration.txt")) as file:
            return file.read().strip() == str(iteration)
    except OSError:
        return False


def _who_is_here(stays: bool) -> tuple[list[bool], list[bool]]:
    """Return which replicas are present, and which of them stay. The result is the same on all
    ranks of all replicas."""
    count = job.replicas()
    own = torch.zeros(2 * count, dtype=torch.float64)
    own[job.replica()] = 1
    own[count + job.replica()] = stays
    flags = _summed(own, "here")
    return flags[:count], flags[count:]


def _has_done(what: str, replica: int) -> bool:
    """Return whether all ranks of a replica have reached this point. The result is the same on all
    ranks of all replicas."""
    own = torch.zeros(job.replicas(), dtype=torch.float64)
    own[job.replica()] = 1
    return _summed(own, what)[replica]


def _summed(own: torch.Tensor, what: str) -> list[bool]:
    """Return, for each element, whether its sum over replicas is non-zero on every rank of this
    replica. Servers wait as long as a save takes, where collectives inside a replica would time
    out."""
    job.sum_over_replicas(own, f"save/{what}", always=True)
    return [not lacks for lacks in job.most_inside((own == 0).int().tolist())]
