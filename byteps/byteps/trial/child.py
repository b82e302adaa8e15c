"""A launch of the user's command: a child of this process, with all that it starts."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from byteps.trial.command import Launch

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GRACE_S = 40.0
"""Time for a launcher to end its ranks: torchrun gives these 30 s."""
_REST_S = 5.0
"""Time in which what a launcher has left may end by itself, such as servers."""
_LINES = 40
"""Lines that are shown of a launch that failed."""
_TRACEBACK = re.compile(r"^(\[rank\d+\]: ?)?Traceback \(most recent call last\):")
_OURS = re.compile(r"(INFO|WARNING|ERROR) (worker|server|scheduler) [-\d]+ \S+ \S+:\d+: ")


class Child:
    """The command, as it runs; a context manager, which leaves no process behind.

    Processes whose parent has ended become this process's children, so that none is lost.
    """

    def __init__(self, launch: Launch, env: Mapping[str, str], log: Path) -> None:
        """Raises OSError where the command cannot be started."""
        self._log = log
        kept = {name: value for name, value in env.items() if name not in launch.unset}
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                launch.words,
                env={**kept, **launch.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which ends it
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                # Ended by the launcher, which was told to; deadline: _GRACE_S.
                self._process.wait(_GRACE_S)
        elif self._process.returncode == 0:  # ranks that end in order leave servers for a moment
            _wait_until_gone(time.monotonic() + _REST_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in descendants():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            _wait_until_gone(time.monotonic() + _REST_S)
        # Ended by SIGKILL, at the latest; deadline: none.
        self._process.wait()

    def wait(self, limit_s: float) -> int | None:
        """The exit status; None where it still runs."""
        try:
            # Ended by the command; deadline: the caller's.
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def own_error(self) -> str:
        """The command's own error, as it printed it."""
        lines = error_of(self._log.read_text(errors="replace").splitlines())
        return "\n".join(f"  | {line}" for line in lines) or "  | (it has printed nothing)"


def error_of(lines: Sequence[str]) -> list[str]:
    """The first traceback of these lines, whose exception is the cause of the others'; without one,
    the last lines that are none of BytePS's log."""
    for first, line in enumerate(lines):
        if found := _TRACEBACK.match(line):
            prefix = found[1] or ""
            last = first + 1
            while last < len(lines) - 1 and lines[last].startswith(
                (f"{prefix} ", f"{prefix}Trace")
            ):
                last += 1
            return list(lines[first : last + 1])[-_LINES:]
    return [line for line in lines if not _OURS.search(line)][-_LINES:]


def _wait_until_gone(deadline: float) -> None:
    while descendants() and time.monotonic() < deadline:
        time.sleep(0.05)


def descendants() -> list[int]:
    """Processes that run and that this one has started, or that these have."""
    children: dict[int, list[tuple[int, str]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(parent), []).append((int(stat.parent.name), state))
    found, wanted = list[int](), [os.getpid()]
    while wanted:
        for pid, state in children.get(wanted.pop(), []):
            wanted.append(pid)
            if state != "Z":
                found.append(pid)
    return found
