# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Replicas that are lost, and replicas that come back, between two steps.

After each step at which replicas meet, one small sum over them says which of them are there, which
leave, and whether one that has come back joins. What sums have lacked is told, and written down. A
replica joins while all others wait: the first one gives it what it lacks (:mod:`.replica_state`).
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import bytepslib, leaving, lost_samples, outer_steps, replica_state, replicas

if TYPE_CHECKING:
    from byteps.torch.members import Choice

_told: set[int] = set()
"""Replicas of whose loss this process has told, until they are back."""
_told_until: int | None = None
"""Consumed samples of which it was told which were lost; None: this process has made no step."""


def join(args: Namespace, model: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
    """The model is built. If this replica has come to a job that runs, wait until it may join, and
    take all that the others have from one of them.

    Raises:
        byteps.torch.BytePSError: the job has ended, or the replica that gives was lost.
    """
    members = bytepslib.members
    if not members.is_late():
        return
    began = time.monotonic()
    view = members.join()
    waited, began = time.monotonic() - began, time.monotonic()
    giver = view.donor(replicas.number())
    state = replica_state.State(args, model, optimizer, scheduler)
    global _told_until
    state.take(replicas.peers()[giver], f"join/{view.lives[replicas.number()]}")
    _told_until = args.consumed_train_samples
    _compare(model)
    if torch.distributed.get_rank() == 0:
        print(
            f"dpu_reduce: replica {replicas.number()} has joined after iteration {args.iteration}: "
            f"it waited {waited:.1f} s for the others to be between two steps, and took "
            f"{state.megabytes:.1f} MB per rank from replica {giver} "
            f"{_of_servers(state)}in {time.monotonic() - began:.2f} s",
            flush=True,
        )


def _of_servers(state: replica_state.State) -> str:
    megabytes = state.megabytes_of_servers
    return f"and {megabytes:.1f} MB from the servers " if megabytes else ""


def between_steps(
    args: Namespace,
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    iteration: int,
    operations: float,
) -> None:
    """An iteration is done, and another one follows. All ranks of all replicas call this.

    Args:
        iteration: how many are done.
        operations: floating-point operations of all of them.

    Raises:
        byteps.torch.BytePSError: this replica was removed, or a server was lost.
        RuntimeError: the replicas have parted.
    """
    if not outer_steps.meets(args):
        return
    missing, leaves = _known_inside(bytepslib.members.take_missing(), leaving.told())
    choice = None
    if torch.distributed.get_rank() == 0:
        control = "replicas/control"
        choice = bytepslib.members.choose(control, replicas.peers(), leaves=leaves)
    choice = _told_inside(choice)
    _tell(args, missing, choice)
    global _told_until
    _told_until = args.consumed_train_samples
    if leaves:
        leaving.leave(iteration)
    # One that leaves does not save the next checkpoint.
    stays = [there and not goes for there, goes in zip(choice.present, choice.leaving, strict=True)]
    replicas.set_present(stays)
    if choice.joiner >= 0:
        _admit(args, model, optimizer, scheduler, choice, iteration, operations)


def _most_inside(facts: Sequence[int]) -> list[int]:
    """Of each number the largest that a rank of this replica has."""
    most = torch.tensor(facts, dtype=torch.int64)
    if torch.distributed.get_backend() == "nccl":
        most = most.cuda()
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    found: list[int] = most.tolist()
    return found


def _known_inside(missing: set[int], leaves: bool) -> tuple[set[int], bool]:
    """What sums of any rank of this replica have lacked, and whether any was told to end."""
    lacking = [int(replica in missing) for replica in range(replicas.count())]
    *flags, any_leaves = _most_inside([*lacking, int(leaves)])
    return {replica for replica, flag in enumerate(flags) if flag}, bool(any_leaves)


def _told_inside(choice: Choice | None) -> Choice:
    """Rank 0's choice, on all ranks of this replica."""
    count = replicas.count()
    facts = [0] * (2 * count + 2)
    if choice is not None:
        facts = [*choice.present, *choice.leaving, choice.joiner + 1, choice.life]
    *flags, joiner, life = _most_inside(facts)
    return bytepslib.members.Choice(
        joiner=joiner - 1,
        life=life,
        present=tuple(bool(flag) for flag in flags[:count]),
        leaving=tuple(bool(flag) for flag in flags[count:]),
    )


def _tell(args: Namespace, missing: set[int], choice: Choice) -> None:
    """One line for each replica that was lost or leaves, and one for each step that lacks the
    samples of one."""
    if torch.distributed.get_rank() != 0:
        return
    for replica, goes in enumerate(choice.leaving):
        if goes and replica != replicas.number():
            print(
                f"dpu_reduce: replica {replica} was told to end, and leaves after iteration "
                f"{args.curr_iteration + 1}; all of its samples until then count",
                flush=True,
            )
    new = sorted(missing - _told)
    _told.update(missing)
    _told.difference_update(there for there, is_there in enumerate(choice.present) if is_there)
    if not missing:
        return
    from ...num_microbatches_calculator import get_current_global_batch_size

    until = args.consumed_train_samples
    first = until - get_current_global_batch_size() if _told_until is None else _told_until
    lost = (until - first) // replicas.count() * len(missing)
    iteration = args.curr_iteration + 1
    if new:
        news = bytepslib.members.view().news
        print(
            f"dpu_reduce: from iteration {iteration} on without replica "
            f"{', '.join(map(str, new))}: {lost} of the last {until - first} "
            f"samples were not, or not wholly, trained on; sums are scaled. {news}",
            flush=True,
        )
    present = [replica for replica, there in enumerate(choice.present) if there]
    if replicas.number() == min(present):
        lost_samples.write(args.save, iteration, first, until - first, sorted(missing))


def _admit(
    args: Namespace,
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    choice: Choice,
    iteration: int,
    operations: float,
) -> None:
    began = time.monotonic()
    rank = torch.distributed.get_rank()
    outer_steps.before_join(model)
    torch.distributed.barrier()
    if rank == 0:  # all ranks of this replica are between two steps, and then all of all
        replicas.sum_(torch.zeros(1), "rest", always=True)
    torch.distributed.barrier()
    view = bytepslib.members.admit(choice.joiner, choice.life, asks=rank == 0)
    if view is not None and view.donor(choice.joiner) == replicas.number():
        state = replica_state.State(args, model, optimizer, scheduler)
        state.give(replicas.peers()[choice.joiner], f"join/{choice.life}", iteration, operations)
    _compare(model)
    bytepslib.members.take_missing()  # of these sums, which are of no step
    if rank == 0:
        what = "has joined" if view is not None else "was lost before it had joined"
        print(
            f"dpu_reduce: replica {choice.joiner} {what} after iteration {iteration}; the others "
            f"waited {time.monotonic() - began:.2f} s",
            flush=True,
        )


def _compare(model: Sequence[Any]) -> None:
    """All replicas that are there call this, and the one that has joined.

    Raises:
        RuntimeError: they have different parameters.
    """
    if not replicas.are_alike(model):
        raise RuntimeError(
            "--use-dpu-reduce: the replicas' parameters are different though one of them was just "
            "given another one's: their GPUs or layouts are not alike"
        )
