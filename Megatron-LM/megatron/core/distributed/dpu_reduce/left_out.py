# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Steps that a slow replica leaves out, so that others do not wait for it.

With ``--dpu-outer-steps`` replicas meet once in many steps. Once ``--dpu-quorum`` of them are there,
one that is not computes no more: it reads past its samples, and exchanges what it has learned in
fewer steps. So it stays in the job, and costs the others about one of its steps.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import bytepslib, lost_samples, outer_steps, replicas

_since: tuple[int, int] | None = None
"""The first iteration that is left out, and its first sample."""


def forget() -> None:
    """Training is done."""
    global _since
    _since = None


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
    global _since
    if not args.dpu_quorum or not outer_steps.running() or not _is_awaited():
        _tell(args, args.curr_iteration, args.consumed_train_samples)
        return False
    if _since is None:
        _since = args.curr_iteration, args.consumed_train_samples
    from ...num_microbatches_calculator import get_num_microbatches

    microbatches = get_num_microbatches()
    for one in _iterators(data):
        for _ in range(microbatches):
            next(one)
        if hasattr(one, "advance"):  # what could be run again is not kept
            one.advance()
    samples = microbatches * args.micro_batch_size * args.data_parallel_size
    scheduler.step(increment=samples * getattr(args, "gtp_weight_remat_size", 1))
    outer_steps.iteration_ended(args, model, optimizer)
    if args.curr_iteration + 1 == args.train_iters:
        _tell(args, args.train_iters, args.consumed_train_samples + samples)
    return True


def _iterators(data: Any) -> Iterator[Any]:
    for one in data if isinstance(data, list) else [data]:
        if one is not None:
            yield one


def _is_awaited() -> bool:
    """Whether others wait for an exchange of any rank of this replica; the same on all of them."""
    mine = any(outer_steps.is_of_exchange(name) for name in bytepslib.members.awaited())
    flag = torch.tensor([int(mine)])
    if torch.distributed.get_backend() == "nccl":
        flag = flag.cuda()
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag.item())


def _tell(args: Namespace, iteration: int, sample: int) -> None:
    """Say and write down what was left out until this iteration and sample, if anything was."""
    global _since
    if _since is None:
        return
    (first, begin), _since = _since, None
    if torch.distributed.get_rank() != 0:
        return
    print(
        f"dpu_reduce: replica {replicas.number()} left out iterations {first + 1} to {iteration}, "
        f"{(sample - begin) // replicas.count()} samples: {args.dpu_quorum} replicas waited for it "
        "(--dpu-quorum)",
        flush=True,
    )
    lost_samples.write(args.save, iteration, begin, sample - begin, [replicas.number()])
