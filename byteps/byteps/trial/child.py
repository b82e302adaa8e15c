"""A launch of the user's command: a child process, and all processes that the child starts."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from byteps.launcher.child import Child
from byteps.trial.command import Launch

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GRACE_S = 40.0
"""Time in seconds that a launcher has to end its ranks. torchrun gives its ranks 30 s."""
_REST_S = 5.0
"""Time in seconds for processes that a launcher has left behind, such as servers, to end by
themselves."""
_LINES = 40
"""Number of log lines that are shown of a failed launch."""
_TRACEBACK = re.compile(r"^(\[rank\d+\]: ?)?Traceback \(most recent call last\):")
_ROOT_CAUSE = re.compile(
    r"^Root Cause .*\n\[\d+\]:\n.*\n.*\n  rank +: (\d+) .*\n  exitcode +: (-?\d+) ", re.MULTILINE
)
"""torchrun's report of the rank that ended first."""
_LOGS = re.compile(
    r"^[EWI]\d{4} .* torch/|(INFO|WARNING|ERROR) (worker|server|scheduler) [-\d]+ \S+ \S+:\d+: "
)
"""Lines of torchrun's log and of BytePS's."""


class Command:
    """The running command, as a context manager that leaves no process behind.

    When the parent of a process ends, this process becomes its parent, so that no process is lost.
    """

    def __init__(self, launch: Launch, env: Mapping[str, str], log: Path) -> None:
        """Start the command. Raises RuntimeError if this fails."""
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._child = Child(
            "the command",
            launch.words,
            {**env, **launch.env},
            log,
            before=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )
        self._child.expect_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.running:
            self._child.signal(signal.SIGTERM)
            self.wait(_GRACE_S)
        elif self._child.status == 0:  # servers end a moment after ranks that end in order
            _wait_until_gone(time.monotonic() + _REST_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in descendants():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            _wait_until_gone(time.monotonic() + _REST_S)
        self.wait(_REST_S)

    def wait(self, limit_s: float) -> int | None:
        """Wait at most `limit_s` seconds; return the exit status, or None if the command still
        runs."""
        self._child.wait(time.monotonic() + limit_s)
        return self._child.status

    def failure(self) -> str:
        """Return how the command ended. If torchrun names it, also return the rank that ended
        first. The text is empty for status 0."""
        status = self._child.status
        return f"ended {_how(status)}{first_failure(self._text())}" if status else ""

    def own_error(self) -> str:
        """Return the error that the command has printed."""
        lines = error_of(self._text().splitlines())
        return "\n".join(f"  | {line}" for line in lines) or "  | (it has printed nothing)"

    def _text(self) -> str:
        return self._child.log.read_text(errors="replace")


def _how(status: int) -> str:
    with suppress(ValueError):
        return f"by {signal.Signals(-status).name}"
    return f"with status {status}"


def first_failure(text: str) -> str:
    """Return the rank that ended first, and how, from torchrun's report; empty without one."""
    match = _ROOT_CAUSE.search(text)
    return f": rank {match[1]} ended {_how(int(match[2]))}" if match else ""


def error_of(lines: Sequence[str]) -> list[str]:
    """Return the first traceback of a rank, because later ones are consequences. Without a
    traceback, return the last lines that are not log lines of BytePS or torchrun."""
    # torchrun prints this line when its ranks have ended. A traceback of its own follows.
    lines = list(itertools.takewhile(lambda line: "] failed (exitcode: " not in line, lines))
    begins = [number for number, line in enumerate(lines) if _TRACEBACK.match(line)]
    if not begins:
        return [line for line in lines if not _LOGS.search(line)][-_LINES:]
    # A rank's lines begin with its prefix, and may be mixed with lines of other ranks.
    prefix = lines[begins[0]].partition("Traceback")[0]
    own = [line for line in lines[begins[0] :] if line.startswith(prefix)]
    frames = list(itertools.takewhile(lambda line: line.startswith(f"{prefix} "), own[1:]))
    return own[: len(frames) + 2][-_LINES:]


def _wait_until_gone(deadline: float) -> None:
    while descendants() and time.monotonic() < deadline:
        time.sleep(0.05)


def descendants() -> list[int]:
    """Return the running processes that descend from this process."""
    children: dict[int, list[tuple[int, str]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(parent), []).append((int(stat.parent.name), state))
    pids, wanted = list[int](), [os.getpid()]
    while wanted:
        for pid, state in children.get(wanted.pop(), []):
            wanted.append(pid)
            if state != "Z":
                pids.append(pid)
    return pids
