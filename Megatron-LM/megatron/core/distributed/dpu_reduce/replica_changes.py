# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Handles replicas that leave, are lost, or come back, between two steps.

After each step at which replicas meet, a small sum over all replicas shows which of them are
present, which leave, and whether one joins. Samples whose gradients a sum has lacked are logged and
recorded. While a replica joins, all others wait, and the first of them sends it the state
(:mod:`.replica_state`).

A machine that is about to be reclaimed sends SIGTERM to its processes. When any rank of a replica
receives the signal, the replica finishes its current step and leaves. The pushes of this replica
count, and the other replicas go on without waiting for it.
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
"""Time in seconds that a rank of a removed replica has to end by the error that gives the
reason."""

_before: dict[int, Any] = {}
"""Megatron's signal handlers, by signal number."""


class _Notice:
    """Receives signals that ask this rank to end."""

    def __init__(self, args: Namespace) -> None:
        """Install the handlers. Only the main thread may call this."""
        self.received = False
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
        # A process that was forked from a rank ends by the signal, as without this handler.
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received = True
        before = _before[number]
        # Megatron's handler also runs, because the job ends if all replicas receive the signal.
        if callable(before):
            before(number, frame)

    def _watch(self) -> None:
        """End the process if it was asked to end while its main thread waits for ranks that are
        gone. (The main thread then runs no handlers, and may wait for ever.)"""
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
        if os.getpid() != self._process or not _in_main_thread():
            return
        for number in self._numbers:
            if signal.getsignal(number) == self._on:
                signal.signal(number, signal.SIG_DFL)
        now = signal.set_wakeup_fd(self._wakes)
        if now == self._writes:
            os.close(now)  # closing the pipe ends the watching thread
        else:
            signal.set_wakeup_fd(now)  # the descriptor belongs to other code, so it is put back


_notice: _Notice | None = None


def wait_for_training(args: Namespace) -> None:
    """Until training begins, let a signal end this process at once."""
    if not _before:
        atexit.register(_end_loaders)
    if _in_main_thread():
        for number in _numbers(args):
            before = signal.signal(number, signal.SIG_DFL)
            _before.setdefault(number, before)


def _end_loaders() -> None:
    """Kill the processes that load data, because they ignore SIGTERM. The interpreter would send
    them SIGTERM at its end, and then wait for ever."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def _numbers(args: Namespace) -> set[int]:
    """Return the signals that ask the job to end."""
    handled = getattr(args, "exit_signal_handler", False)
    return {int(signal.SIGTERM), *([int(args.exit_signal)] if handled else [])}


def listen(args: Namespace) -> None:
    """From now on, SIGTERM ends this replica's part in the job. Called when training begins."""
    global _notice
    if _notice is None and _in_main_thread():
        _notice = _Notice(args)


def forget() -> None:
    """Restore the default at the end of training: SIGTERM ends this process."""
    global _notice
    if _notice is not None:
        notice, _notice = _notice, None
        notice.close()


def was_asked_to_end() -> bool:
    """Return whether this rank was asked to end."""
    return _notice is not None and _notice.received


_leaves = False
"""Last result of :func:`wants_to_end`."""


def leaves() -> bool:
    """Return whether this replica leaves after this iteration. If all replicas end, none leaves."""
    return _leaves


def wants_to_end(flag: bool) -> bool:
    """Return whether any rank of this replica was asked to end. If so, and if another replica was
    not asked, this replica leaves after this iteration. Signals that arrive later count in the next
    iteration. Otherwise all replicas could leave, and none would save a checkpoint."""
    global _leaves
    (any_rank,) = job.most_inside([int(flag or was_asked_to_end())])
    _leaves = bool(any_rank)
    return _leaves


def leave(iteration: int) -> NoReturn:
    """Leave the other replicas, which go on, and end this process. All ranks of the replica call
    this after an agreement with the others. Only exchanges of outer steps may be in flight.

    Raises:
        SystemExit: always.
        byteps.torch.BytePSError: this replica was removed, or a server was lost.
    """
    outer_steps.end_exchanges()
    # The first rank that leaves removes the whole replica, so all ranks wait for each other here.
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        print(
            f"dpu_reduce: this replica was told to end (SIGTERM), and leaves after iteration "
            f"{iteration}",
            flush=True,
        )
    global _notice
    _notice = None  # a second SIGTERM is ignored from now on
    why = f"it was told to end by SIGTERM, and left after iteration {iteration}"
    status = bytepslib.session.leave(why)
    saves.finish()
    raise SystemExit(status)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


# Changes of replicas: some are lost, and some come back.


def join(args: Namespace, model: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
    """Wait until this replica may join, and copy the state of another one. Do nothing unless the
    job was running when this replica came. Call this when the model is built."""
    members = bytepslib.members
    if not members.is_late():
        return
    began = time.monotonic()
    view = members.join()
    waited, began = time.monotonic() - began, time.monotonic()
    giver = view.donor(job.replica())
    state = replica_state.State(args, model, optimizer, scheduler)
    state.take(job.peers()[giver], f"join/{view.ready_epochs[job.replica()]}")
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


def change_replicas(
    args: Namespace,
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    iteration: int,
    operations: float,
) -> None:
    """Handle changes of replicas after an iteration, even the last one. All ranks of all replicas
    call this, after :func:`wants_to_end`.

    Args:
        iteration: number of completed iterations.
        operations: floating-point operations of all completed iterations.

    Raises:
        byteps.torch.BytePSError: this replica was removed, or a server was lost.
        RuntimeError: the replicas have diverged.
    """
    if not outer_steps.meets(args):
        return
    leaves_now = _leaves and iteration < args.train_iters
    missing = lost_samples.take_missing()
    choice = None
    if torch.distributed.get_rank() == 0:
        control = "replicas/control"
        choice = bytepslib.members.choose(control, job.peers(), leaves=leaves_now)
    choice = _choice_of_first_rank(choice)
    _tell_leaving(args, choice)
    lost_samples.tell(args, missing, choice.present)
    if leaves_now:
        leave(iteration)
    if choice.joiner >= 0 and iteration < args.train_iters:
        _admit(args, model, optimizer, scheduler, choice, iteration, operations)


def _choice_of_first_rank(choice: Choice | None) -> Choice:
    """Broadcast rank 0's choice to all ranks of this replica."""
    count = job.replicas()
    facts = [0] * (2 * count + 2)
    if choice is not None:
        facts = [*choice.present, *choice.leaving, choice.joiner + 1, choice.ready_epoch]
    *flags, joiner, ready_epoch = job.most_inside(facts)
    return bytepslib.members.Choice(
        joiner=joiner - 1,
        ready_epoch=ready_epoch,
        present=tuple(bool(flag) for flag in flags[:count]),
        leaving=tuple(bool(flag) for flag in flags[count:]),
    )


def _tell_leaving(args: Namespace, choice: Choice) -> None:
    """Log a line for each replica that leaves."""
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
    # All ranks of this replica are between two steps here. After this sum, the ranks of all
    # replicas are.
    if rank == 0:
        job.sum_over_replicas(torch.zeros(1), "rest", always=True)
    torch.distributed.barrier()
    view = bytepslib.members.admit(choice.joiner, choice.ready_epoch, asks=rank == 0)
    if view is not None and view.donor(choice.joiner) == job.replica():
        state = replica_state.State(args, model, optimizer, scheduler)
        state.give(job.peers()[choice.joiner], f"join/{choice.ready_epoch}", iteration, operations)
    _compare(model)
    # Replicas that these sums have lacked are cleared, because the sums belong to no step.
    bytepslib.members.take_missing()
    if rank == 0:
        what = "has joined" if view is not None else "was lost before it had joined"
        print(
            f"dpu_reduce: replica {choice.joiner} {what} after iteration {iteration}; the others "
            f"waited {time.monotonic() - began:.2f} s",
            flush=True,
        )


def _compare(model: Sequence[Any]) -> None:
    """Check that replicas are equal. All present replicas call this, including the one that has
    joined.

    Raises:
        RuntimeError: replicas have different parameters.
    """
    if not job.replicas_are_alike(model):
        raise RuntimeError(
            "--use-dpu-reduce: a replica that has just joined differs from the replica whose "
            "parameters and buffers it copied: their GPUs or layouts are not alike"
        )
