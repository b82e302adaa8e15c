"""A process that embedded mode has started, and waiting for several of them."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from byteps import logs
from byteps.launcher.places import byteps_error

EXECUTABLE = "byteps-server"
LOG_LINES_SHOWN = 20

_endings = threading.Condition()  # notified whenever a child has ended


def find_executable() -> str:
    """Path of byteps-server: the one of this Python's environment before any on PATH."""
    for folder in (os.path.dirname(sys.executable), sysconfig.get_path("scripts")):
        candidate = os.path.join(folder, EXECUTABLE)
        if os.access(candidate, os.X_OK):
            return candidate
    found = shutil.which(EXECUTABLE)
    if found is None:
        raise byteps_error(
            f"embedded mode starts {EXECUTABLE}, which is neither next to {sys.executable} nor on "
            "PATH: install the byteps wheel into this environment, or set DMLC_PS_ROOT_URI and "
            "DMLC_PS_ROOT_PORT to join a cluster that runs already"
        )
    return found


class Child:
    """A process started here, with a log file of its own.

    A thread of its own starts the process and waits for it. The thread must live as long as the
    process: the kernel's parent-death signal is sent when the *thread* that forked ends, so a child
    started by a short-lived caller's thread would die with that.
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
    ) -> None:
        """
        Args:
            cores: where it may run; empty: where this process may.
            on_end: called in the thread, once the process has ended.
        """
        self.title, self.log = title, log
        self.ended_at = 0.0  # of time.monotonic()
        self._command, self._env = list(command), dict(env)
        self._cores, self._on_end = cores, on_end
        self._lock = threading.Lock()  # between reaping the process and signalling it
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        self._expected = False
        self._started, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=self._keep, name=f"byteps-{title}", daemon=True).start()
        # Ended by the thread, once it has tried to start; deadline: none.
        self._started.wait()
        if self._failure is not None:
            raise byteps_error(f"cannot start {title} ({self._command[0]}): {self._failure}")

    def _keep(self) -> None:
        try:
            with contextlib.suppress(OSError):  # cores that the machine has taken away
                if self._cores:  # of this thread, whose process inherits them
                    os.sched_setaffinity(0, self._cores)
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C is for the ranks: they leave the cluster, which ends the children.
                    start_new_session=True,
                )
        except OSError as error:
            self._failure = error
            self._ended.set()
            return
        finally:
            self._started.set()
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            # Ended by waitid above: it has ended; deadline: none.
            status = self._process.wait()
        if status != 0 and not self._expected:
            # Not print(): at interpreter exit a daemon thread must not wait for stderr's lock.
            with contextlib.suppress(OSError):
                os.write(2, self._obituary(status).encode(errors="replace"))
        with _endings:
            self.ended_at = time.monotonic()
            self._ended.set()
            _endings.notify_all()
        self._on_end()

    def _obituary(self, status: int) -> str:
        what = f"signal {-status}" if status < 0 else f"exit status {status}"
        lines = [f"embedded {self.title} ended with {what}; the end of {self.log}:"]
        lines += [f"  {line}" for line in self.last_lines()]
        return logs.render(logging.ERROR, "\n".join(lines)) + "\n"

    def last_lines(self) -> list[str]:
        try:
            return self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        except OSError:
            return []

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode if self._process is not None else None

    @property
    def failed(self) -> bool:
        """It has ended, neither with status 0 nor by a signal of ours."""
        return not self.running and self.status not in (None, 0) and not self._expected

    def wait(self, deadline: float) -> bool:
        """Whether it ended before `deadline` (of time.monotonic())."""
        # Ended by the end of the child; deadline: the caller's.
        return self._ended.wait(max(0.0, deadline - time.monotonic()))

    def signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self._process is not None and self._process.returncode is None:
                self._expected = True
                self._process.send_signal(number)


def wait_all(children: Sequence[Child], deadline: float, grace_s: float) -> None:
    """Wait until all have ended, or the deadline, or ``grace_s`` after one of them has failed."""
    with _endings:
        while any(child.running for child in children):
            failures = [child.ended_at + grace_s for child in children if child.failed]
            left = min([deadline, *failures]) - time.monotonic()
            if left <= 0:
                return
            # Ended by the end of a child; deadline: the caller's, or of grace.
            _endings.wait(min(left, threading.TIMEOUT_MAX))
