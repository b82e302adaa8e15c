# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""A replica that is told to end, by SIGTERM, leaves the others between two steps.

A machine that is about to be taken away says so by SIGTERM to its processes. Once any rank of a
replica has got it, the replica finishes the step that it is in. What it has pushed counts, and the
others go on without waiting for it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from types import FrameType
from typing import Any, NoReturn

import torch

from . import bytepslib, outer_steps

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
    _finish_saves()
    raise SystemExit(status)


def _finish_saves() -> None:
    """Wait for a checkpoint that is being written."""
    saves = sys.modules.get("megatron.training.async_utils")
    finish = getattr(saves, "maybe_finalize_async_save", None)
    if finish is not None:
        finish(blocking=True, terminate=True)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
