# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Replicas that leave, that are lost, and that come back, between two steps.

After each step at which replicas meet, one small sum over them says which of them are there, which
leave, and whether one that has come back joins. What sums have lacked is told, and written down. A
replica joins while all others wait: the first one gives it what it lacks (:mod:`.replica_state`).

A machine that is about to be taken away says so by SIGTERM to its processes. Once any rank of a
replica has got it, the replica finishes the step that it is in, and leaves. What it has pushed
counts, and the others go on without waiting for it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from . import bytepslib, job, lost_samples, outer_steps, replica_state, saves

if TYPE_CHECKING:
    from byteps.torch.members import Choice


_LOOK_EVERY_S = 0.1
_LAST_WORDS_S = 3.0
"""For a rank of a removed replica to end by the error that says why."""

_before: dict[int, Any] = {}
"""Megatron's handlers, by signal."""


class _Notice:
    """What this rank was told since it listens."""

    def __init__(self, args: Namespace) -> None:
        """Listen, in the main thread."""
        self.told = False
        self._process = os.getpid()
        self._numbers = _numbers(args)
        for number in self._numbers:
            before = signal.signal(number, self._on)
            _before.setdefault(number, before)
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._wakes = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="leaving", daemon=True).start()

    def _on(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # one that a rank has forked ends by it, as ever
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.told = True
        before = _before[number]
        if callable(before):  # Megatron's, by which the job ends where all replicas are told
            before(number, frame)

    def _watch(self) -> None:
        """End a process that was told to end, and whose main thread waits for ranks that are gone:
        it runs no handler, and may wait for ever."""
        while not self._numbers.intersection(data := os.read(self._reads, 64)):
            if not data:
                os.close(self._reads)
                return
        while self is _notice and not bytepslib.members.is_removed():
            time.sleep(_LOOK_EVERY_S)
        time.sleep(_LAST_WORDS_S)
        if self is _notice:
            os._exit(128 + signal.SIGTERM)

    def close(self) -> None:
        """Listen no more."""
        if os.getpid() != self._process or not _in_main_thread():
            return
        for number in self._numbers:
            if signal.getsignal(number) == self._on:
                signal.signal(number, signal.SIG_DFL)
        now = signal.set_wakeup_fd(self._wakes)
        if now == self._writes:
            os.close(now)  # the thread ends
        else:
            signal.set_wakeup_fd(now)  # somebody else's


_notice: _Notice | None = None


def wait_for_training(args: Namespace) -> None:
    """This process has joined the job: until it trains, a signal ends it at once."""
    if not _before:
        atexit.register(_end_loaders)
    if _in_main_thread():
        for number in _numbers(args):
            before = signal.signal(number, signal.SIG_DFL)
            _before.setdefault(number, before)


def _end_loaders() -> None:
    """End the processes that load data: they ignore SIGTERM, by which the interpreter would end
    them, and would be waited for for ever."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def _numbers(args: Namespace) -> set[int]:
    """Signals that mean: end."""
    handled = getattr(args, "exit_signal_handler", False)
    return {int(signal.SIGTERM), *([int(args.exit_signal)] if handled else [])}


def listen(args: Namespace) -> None:
    """Training begins: from now on SIGTERM has the replica leave."""
    global _notice
    if _notice is None and _in_main_thread():
        _notice = _Notice(args)


def forget() -> None:
    """Training is done: SIGTERM ends this process."""
    global _notice
    if _notice is not None:
        notice, _notice = _notice, None
        notice.close()


def told() -> bool:
    """Whether this rank was told to end."""
    return _notice is not None and _notice.told


_leaves = False
"""What :func:`wants_to_end` has said in this iteration."""


def leaves() -> bool:
    """Whether this replica leaves after this iteration, if not all of them end."""
    return _leaves


def wants_to_end(flag: bool) -> bool:
    """Whether a rank of this replica was told to end. If not all replicas were, this one leaves
    after this iteration if it says so here. It does not look again: all of them could leave, each
    for a signal that came after it was asked, and nobody would save a checkpoint.

    Args:
        flag: whether Megatron's own handler has got its signal, on any rank of this replica.
    """
    global _leaves
    (any_told,) = job.most_inside([int(flag or told())])
    _leaves = bool(any_told)
    return _leaves


def leave(iteration: int) -> NoReturn:
    """Leave the others, which go on, and end this process. All ranks of the replica call this once
    they have agreed with the others: nothing is in flight but exchanges of outer steps.

    Raises:
        SystemExit: always.
        byteps.torch.BytePSError: this replica was removed, or a server was lost.
    """
    outer_steps.end_exchanges()
    torch.distributed.barrier()  # with the first of them that leaves, all are out of the job
    if torch.distributed.get_rank() == 0:
        print(
            f"dpu_reduce: this replica was told to end (SIGTERM), and leaves after iteration "
            f"{iteration}",
            flush=True,
        )
    global _notice
    _notice = None  # without its end: SIGTERM, which may come twice, changes nothing any more
    why = f"it was told to end by SIGTERM, and left after iteration {iteration}"
    status = bytepslib.session.leave(why)
    saves.finish()
    raise SystemExit(status)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


# Replicas that are lost, and replicas that come back.


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
    giver = view.donor(job.replica())
    state = replica_state.State(args, model, optimizer, scheduler)
    state.take(job.peers()[giver], f"join/{view.lives[job.replica()]}")
    lost_samples.begin(args)
    _compare(model)
    if torch.distributed.get_rank() == 0:
        print(
            f"dpu_reduce: replica {job.replica()} has joined after iteration {args.iteration}: "
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
    """An iteration is done, the last one maybe. All ranks of all replicas call this, after
    :func:`wants_to_end`.

    Args:
        iteration: how many are done.
        operations: floating-point operations of all of them.

    Raises:
        byteps.torch.BytePSError: this replica was removed, or a server was lost.
        RuntimeError: the replicas have parted.
    """
    if not outer_steps.meets(args):
        return
    leaves_now = _leaves and iteration < args.train_iters
    missing = lost_samples.take_missing()
    choice = None
    if torch.distributed.get_rank() == 0:
        control = "replicas/control"
        choice = bytepslib.members.choose(control, job.peers(), leaves=leaves_now)
    choice = _told_inside(choice)
    _tell_leaving(args, choice)
    lost_samples.tell(args, missing, choice.present)
    if leaves_now:
        leave(iteration)
    if choice.joiner >= 0 and iteration < args.train_iters:
        _admit(args, model, optimizer, scheduler, choice, iteration, operations)


def _told_inside(choice: Choice | None) -> Choice:
    """Rank 0's choice, on all ranks of this replica."""
    count = job.replicas()
    facts = [0] * (2 * count + 2)
    if choice is not None:
        facts = [*choice.present, *choice.leaving, choice.joiner + 1, choice.life]
    *flags, joiner, life = job.most_inside(facts)
    return bytepslib.members.Choice(
        joiner=joiner - 1,
        life=life,
        present=tuple(bool(flag) for flag in flags[:count]),
        leaving=tuple(bool(flag) for flag in flags[count:]),
    )


def _tell_leaving(args: Namespace, choice: Choice) -> None:
    """One line for each replica that leaves."""
    if torch.distributed.get_rank() != 0:
        return
    for replica, goes in enumerate(choice.leaving):
        if goes and replica != job.replica():
            print(
                f"dpu_reduce: replica {replica} was told to end, and leaves after iteration "
                f"{args.curr_iteration + 1}; all of its samples until then count",
                flush=True,
            )


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
        job.sum_over_replicas(torch.zeros(1), "rest", always=True)
    torch.distributed.barrier()
    view = bytepslib.members.admit(choice.joiner, choice.life, asks=rank == 0)
    if view is not None and view.donor(choice.joiner) == job.replica():
        state = replica_state.State(args, model, optimizer, scheduler)
        state.give(job.peers()[choice.joiner], f"join/{choice.life}", iteration, operations)
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
    if not job.replicas_are_alike(model):
        raise RuntimeError(
            "--use-dpu-reduce: the replicas' parameters or buffers are different though one of "
            "them was just given another one's: their GPUs or layouts are not alike"
        )
