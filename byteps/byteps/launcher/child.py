"""Child processes of embedded mode: starting one, and ending several."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from byteps import logs
from byteps.launcher.places import byteps_error

EXECUTABLE = "byteps-server"
LOG_LINES_SHOWN = 20
_LOG_HEAD = re.compile(r"(?:\S+ )?(INFO|WARNING|ERROR|FATAL) \w+ \S+ \S+ \S+:\d+: ")

_endings = threading.Condition()
"""Condition that is notified when a child has ended. It is held while a child is reaped or
signalled."""


def find_executable() -> str:
    """Return the path of byteps-server: in this Python's environment or, if it has none, on
    PATH."""
    for folder in (os.path.dirname(sys.executable), sysconfig.get_path("scripts")):
        candidate = os.path.join(folder, EXECUTABLE)
        if os.access(candidate, os.X_OK):
            return candidate
    executable = shutil.which(EXECUTABLE)
    if executable is None:
        raise byteps_error(
            f"embedded mode starts {EXECUTABLE}, which is neither next to {sys.executable} nor on "
            "PATH: install the byteps wheel into this environment, or set DMLC_PS_ROOT_URI and "
            "DMLC_PS_ROOT_PORT to join a cluster that runs already"
        )
    return executable


class Child:
    """Process that this process has started, with a log file of its own.

    A thread of this object starts the process and waits for it. The thread lives as long as the
    process, because the kernel sends the parent-death signal when the *thread* that forked ends. A
    child of a short-lived thread would die with the thread.
    """

    def __init__(
        self,
        title: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        *,
        cores: Collection[int] = (),
        on_end: Callable[[], None] = lambda: None,
        before: Callable[[], object] | None = None,
    ) -> None:
        """
        Args:
            cores: cores on which the child may run; empty: the same as this process.
            on_end: called in this object's thread once the process has ended.
            before: called in the new process before the command; not safe beside threads that
                hold locks.
        """
        self.title, self.log = title, log
        self.status: int | None = None
        """Exit status, negative for a signal; None while it runs."""
        self.ended_at = 0.0  # time.monotonic()
        self._is_expected = False
        started = Future[subprocess.Popen[bytes]]()

        def keep() -> None:
            try:
                started.set_result(self._start(command, env, cores, before))
            except OSError as error:
                started.set_exception(error)
                return
            self._await_end(started.result())
            on_end()

        threading.Thread(target=keep, name=f"byteps-{title}", daemon=True).start()
        try:
            # The wait is ended by the thread, after its attempt to start; deadline: none.
            self._process = started.result()
        except OSError as error:
            raise byteps_error(f"cannot start {title} ({command[0]}): {error}") from None

    def _start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cores: Collection[int],
        before: Callable[[], object] | None,
    ) -> subprocess.Popen[bytes]:
        with contextlib.suppress(OSError):  # the machine may have taken some of these cores away
            if cores:  # set for this thread, so that the process inherits the cores
                os.sched_setaffinity(0, cores)
        with self.log.open("wb") as log:
            return subprocess.Popen(
                list(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C must reach only the ranks. They leave, and so the child ends.
                start_new_session=True,
                preexec_fn=before,
            )

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with _endings:
            # The wait is ended by the end that waitid has seen; deadline: none.
            status = process.wait()
        if status != 0 and not self._is_expected:
            # print() would wait for stderr's lock, which a daemon thread must not do at interpreter
            # exit.
            with contextlib.suppress(OSError):
                os.write(2, self._obituary(status).encode(errors="replace"))
        with _endings:
            self.status, self.ended_at = status, time.monotonic()
            _endings.notify_all()

    def _obituary(self, status: int) -> str:
        """Return a log line that says how the child ended. If the last line of its log is an error,
        quote it."""
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        last = "".join(self.last_lines()[-1:])
        head = _LOG_HEAD.match(last)
        error = "" if head and head[1] in ("INFO", "WARNING") else last[head.end() if head else 0 :]
        text = f"embedded {self.title} ended with {how}{error and f': {error}'}; its log is "
        return logs.render(logging.ERROR, f"{text}{self.log}") + "\n"

    def last_lines(self) -> list[str]:
        try:
            return self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        except OSError:
            return []

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def running(self) -> bool:
        return self.status is None

    @property
    def failed(self) -> bool:
        """Whether the child has ended unexpectedly, with another status than 0."""
        return self.status not in (None, 0) and not self._is_expected

    def wait(self, deadline: float) -> bool:
        """Wait until the child has ended, or until `deadline` (a time.monotonic()). Return whether
        it has ended."""
        with _endings:
            # The wait is ended by the end of the child; deadline: the caller's.
            return _endings.wait_for(
                lambda: not self.running, max(0.0, deadline - time.monotonic())
            )

    def expect_end(self) -> None:
        """Make the end of the child count as no failure from now on, whatever its exit status."""
        self._is_expected = True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, and expect the child to end. Does nothing if the child has ended
        already."""
        with _endings:
            if self._process.returncode is None:
                self._is_expected = True
                self._process.send_signal(number)


def port_of(scheduler: Child, file: Path, deadline: float) -> int:
    """Wait until a scheduler listens and has written its port to `file`. Remove the file and return
    the port.

    Raises:
        BytePSError: the scheduler ended, or does not listen by `deadline` (a time.monotonic()).
    """
    while not file.exists():
        # The wait is ended by the end of the child; deadline: 10 ms, then the loop looks for the
        # file again.
        ended = scheduler.wait(min(deadline, time.monotonic() + 0.01))
        if ended or time.monotonic() >= deadline:
            what = f"ended with status {scheduler.status} before it listened"
            late = "did not listen in time (BYTEPS_START_TIMEOUT_S)"
            raise byteps_error(
                f"the {scheduler.title} {what if ended else late}: "
                + " / ".join(scheduler.last_lines())
            )
    port = int(file.read_text().split()[1])
    file.unlink()
    return port


def end_all(children: Collection[Child], deadline: float, rest_s: float, grace_s: float) -> None:
    """Wait for the ends of all children, then end the rest. The wait lasts until `deadline` (a
    time.monotonic()), or `rest_s` seconds after a child has failed. Children that still run get
    SIGTERM, and SIGKILL `grace_s` seconds later."""
    try:
        _wait_all(children, deadline, rest_s)
    finally:  # an interrupt ends the wait, but children are still ended
        for number in (signal.SIGTERM, signal.SIGKILL):
            left = [child for child in children if child.running]
            for child in left:
                child.signal(number)
            _wait_all(left, time.monotonic() + grace_s, grace_s)


def _wait_all(children: Collection[Child], deadline: float, rest_s: float) -> None:
    with _endings:
        while any(child.running for child in children):
            failures = [child.ended_at + rest_s for child in children if child.failed]
            left = min([deadline, *failures]) - time.monotonic()
            if left <= 0:
                return
            # The wait is ended by the end of a child; deadline: the caller's, or `rest_s` after a
            # failure.
            _endings.wait(min(left, threading.TIMEOUT_MAX))
