# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Logs samples on which no replica has trained, once, and writes them next to the checkpoints."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Sequence, Set

import torch

from . import bytepslib, job

_reported: set[int] = set()
"""Replicas whose loss this process has logged. A replica that comes back is removed."""
_reported_until: int | None = None
"""Number of consumed samples up to which losses were logged; None before the first step."""


def begin(args: Namespace) -> None:
    """Begin at the current sample when this replica joins. The other replicas have logged earlier
    losses."""
    global _reported_until
    _reported_until = args.consumed_train_samples


def take_missing() -> set[int]:
    """Return the replicas that a sum of any rank of this replica has lacked since the last call."""
    missing = bytepslib.members.take_missing()
    flags = job.most_inside([int(replica in missing) for replica in range(job.replicas())])
    return {replica for replica, flag in enumerate(flags) if flag}


def tell(args: Namespace, missing: Set[int], present: Sequence[bool]) -> None:
    """Log a line for each lost replica. For each step that lacks its samples, write a line to a
    file.

    Args:
        missing: replicas that sums of steps have lacked since the last call.
        present: whether each replica is there now.
    """
    global _reported_until
    if torch.distributed.get_rank() == 0:
        _tell(args, missing, present)
    _reported_until = args.consumed_train_samples


def _tell(args: Namespace, missing: Set[int], present: Sequence[bool]) -> None:
    new = sorted(missing - _reported)
    _reported.update(missing)
    _reported.difference_update(there for there, is_there in enumerate(present) if is_there)
    if not missing:
        return
    from ...num_microbatches_calculator import get_current_global_batch_size

    until = args.consumed_train_samples
    first = until - get_current_global_batch_size() if _reported_until is None else _reported_until
    lost = (until - first) // job.replicas() * len(missing)
    iteration = args.curr_iteration + 1
    if new:
        news = bytepslib.members.view().news
        print(
            f"dpu_reduce: from iteration {iteration} on without replica "
            f"{', '.join(map(str, new))}: {lost} of the last {until - first} "
            f"samples were not, or not wholly, trained on; sums are scaled. {news}",
            flush=True,
        )
    if job.replica() == list(present).index(True):
        record(args.save, iteration, first, until - first, sorted(missing))


_FILE = "dpu_lost_samples.jsonl"


def record(
    folder: str | None, iteration: int, first: int, samples: int, missing: Sequence[int]
) -> None:
    """Add a line to the file in the checkpoints' folder. Do nothing without a folder.

    Args:
        folder: folder of the checkpoints.
        iteration: last iteration of the entry, counted from 1.
        first: index of the first sample.
        samples: number of samples from there on, of all replicas.
        missing: replicas whose part of these samples was left out.
    """
    if not folder:
        return
    os.makedirs(folder, exist_ok=True)
    record = {
        "iteration": iteration,
        "first_sample": first,
        "samples": samples,
        "replicas": list(missing),
    }
    with open(os.path.join(folder, _FILE), "a") as file:
        file.write(json.dumps(record) + "\n")
