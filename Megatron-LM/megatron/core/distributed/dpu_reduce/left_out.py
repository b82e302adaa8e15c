# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Steps that a slow replica leaves out, so that others do not wait for it.

With ``--dpu-outer-steps`` replicas meet once in many steps. Once ``--dpu-quorum`` of them are
there, one that is not computes no more: it reads past its samples, and exchanges what it has
learned in fewer steps. The next time it stops before the step that the others waited for. It makes
one more once it has waited longer than a step takes, and now and then tries. So it stays in the
job, and costs the others little.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import bytepslib, lost_samples, outer_steps, replicas

_TRY_AFTER = 8
"""Exchanges for which nobody has waited."""


@dataclass
class _Pace:
    """What this replica computes between two exchanges; the same on all of its ranks."""

    computed: int = 0
    """Steps since the last exchange began."""
    most: int | None = None
    """So many at most; None: as many as there are."""
    awaited: bool = False
    """Others have waited for it since the last exchange began."""
    quiet: int = 0
    """Exchanges for which nobody has waited, since `most` has changed."""
    began: float = 0.0
    """When the last step that was computed began."""
    step_s: float = 0.0
    """The shortest step."""
    had_time: bool = False
    """This rank has waited in the last exchange for longer than a step."""
    since: tuple[int, int] | None = None
    """The first iteration that was left out and not told yet, and its first sample."""


_pace = _Pace()


def forget() -> None:
    """Training is done."""
    global _pace
    _pace = _Pace()


def leaves_out(
    args: Namespace, data: Any, model: Sequence[Any], optimizer: Any, scheduler: Any
) -> bool:
    """Whether this iteration is left out. Then it is done: its samples were read, the learning rate
    has advanced, and an exchange that was due has been made. All ranks of a replica call this.

    Args:
        data: the rank's iterator, or that of each model chunk; None where it reads nothing.

    Raises:
        byteps.torch.BytePSError: this replica was removed, or a server was lost.
    """
    if not args.dpu_quorum or not outer_steps.running():
        return False
    awaited, had_time = _agree()
    if awaited and not _pace.awaited:
        _pace.awaited, _pace.quiet = True, 0
        _pace.most = max(_pace.computed - 1, 1)
    elif _pace.most is not None and (had_time or _pace.quiet >= _TRY_AFTER):
        _pace.quiet, _pace.most = 0, _pace.most + 1
    if not awaited and (_pace.most is None or _pace.computed < _pace.most):
        _tell(args, args.curr_iteration, args.consumed_train_samples)
        _pace.began = time.monotonic()
        return False
    if _pace.since is None:
        _pace.since = args.curr_iteration, args.consumed_train_samples
    from ...num_microbatches_calculator import get_num_microbatches

    microbatches = get_num_microbatches()
    for one in _iterators(data):
        for _ in range(microbatches):
            next(one)
        if hasattr(one, "advance"):  # what could be run again is not kept
            one.advance()
    samples = microbatches * args.micro_batch_size * args.data_parallel_size
    scheduler.step(increment=samples * getattr(args, "gtp_weight_remat_size", 1))
    iteration_ended(args, model, optimizer)
    if args.curr_iteration + 1 == args.train_iters:
        _tell(args, args.train_iters, args.consumed_train_samples + samples)
    return True


def iteration_ended(args: Namespace, model: Sequence[Any], optimizer: Any) -> None:
    """An iteration is done: see :func:`.outer_steps.iteration_ended`."""
    now = time.monotonic()
    if _pace.began:
        took, _pace.began = now - _pace.began, 0.0
        _pace.step_s = min(took, _pace.step_s or took)
        _pace.computed += 1
    if outer_steps.iteration_ended(args, model, optimizer):
        waited = time.monotonic() - now
        _pace.had_time = not _pace.awaited and waited > _pace.step_s > 0
        _pace.quiet += not _pace.awaited
        _pace.computed, _pace.awaited = 0, False


def _iterators(data: Any) -> Iterator[Any]:
    for one in data if isinstance(data, list) else [data]:
        if one is not None:
            yield one


def _agree() -> tuple[bool, bool]:
    """Whether others wait for an exchange of any rank of this replica, and whether all ranks have
    waited for others in the last one."""
    awaited = any(outer_steps.is_of_exchange(name) for name in bytepslib.members.awaited())
    flags = torch.tensor([int(awaited), int(not _pace.had_time)])
    _pace.had_time = False
    if torch.distributed.get_backend() == "nccl":
        flags = flags.cuda()
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    any_awaited, any_had_none = flags.tolist()
    return bool(any_awaited), not any_had_none


def _tell(args: Namespace, iteration: int, sample: int) -> None:
    """Say and write down what was left out until this iteration and sample, if anything was."""
    if _pace.since is None:
        return
    (first, begin), _pace.since = _pace.since, None
    if torch.distributed.get_rank() != 0:
        return
    print(
        f"dpu_reduce: replica {replicas.number()} left out iterations {first + 1} to {iteration}, "
        f"{(sample - begin) // replicas.count()} samples: it is slower than the {args.dpu_quorum} "
        "replicas of --dpu-quorum",
        flush=True,
    )
    lost_samples.write(args.save, iteration, begin, sample - begin, [replicas.number()])
