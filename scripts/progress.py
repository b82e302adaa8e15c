#!/usr/bin/env python3
"""Shows the progress of a long command: as a bar on a terminal, as a line every ten seconds in a
log. It also formats tables for a terminal and as Markdown.

It imports no module of this project, because it runs before the environment exists.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO


def aligned(table: Sequence[Sequence[str]], left: int = 0) -> str:
    """Format a table in columns of equal width: ``left`` columns of text, then right-aligned
    numbers."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )


def pipes(table: Sequence[Sequence[str]]) -> list[str]:
    """Format a table as Markdown."""
    lines = [f"| {' | '.join(line)} |" for line in table]
    return [lines[0], "|" + " --- |" * len(table[0]), *lines[1:]]


def put_between(page: Path, begin: str, end: str, text: str) -> None:
    """Write the text between two marks of a page; ValueError if they are missing."""
    before, opened, rest = page.read_text(encoding="utf-8").partition(begin)
    _, also, after = rest.partition(end)
    if not (opened and also):
        raise ValueError(f"{page} lacks the marks {begin!r} and {end!r}, between which to write")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


EVERY_S = 10.0
REFRESH_S = 0.5
WIDEST = 70
"""Limit, in characters, for the description of the current work in a line."""
END_S = 10.0
"""Time in seconds that a command has to end after SIGTERM."""
LAST_LINES = 60
"""Number of a command's output lines shown if it fails."""

_STEPS = re.compile(
    r"\s*\[(\d+)/(\d+)\]"  # ninja's output
    r"|STEP (\d+)/(\d+)"  # buildah's output
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Make the kernel send the signal when the parent of this process is killed. Called in the
    child (``preexec_fn``).

    For the kernel the parent is the thread that has forked. So that thread must live as long as the
    child.
    """
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, number)


def _bar(name: str, total: int | None, unit: str, stream: TextIO) -> Any | None:
    """Return tqdm's bar. None in a log, or without tqdm, as on a machine with a bundle."""
    # A terminal without a known width (in some containers) gets lines instead.
    if not stream.isatty() or os.get_terminal_size(stream.fileno()).columns == 0:
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(
        desc=name, total=total, unit=f" {unit}", file=stream, leave=False, dynamic_ncols=True
    )


class Progress:
    """Progress of an activity: a context manager, and thread-safe.

    Args:
        name: name of the activity, such as "bench".
        total: number of steps; None: unknown.
        unit: name of steps, such as "launches".
        stream: output; None: stderr.
        every_s: interval of lines in a log, in seconds.
    """

    def __init__(
        self,
        name: str,
        *,
        total: int | None = None,
        unit: str = "steps",
        stream: TextIO | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self._name, self._total, self._unit = name, total, unit
        self._stream = sys.stderr if stream is None else stream
        self._done = 0
        self._doing = ""
        self._begun = self._said = time.monotonic()
        self._lock = threading.Lock()
        self._bar = _bar(name, total, unit, self._stream)
        self._every_s = every_s if self._bar is None else REFRESH_S
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._ticker.start()

    def update(self, doing: str = "", *, done: int | None = None, total: int | None = None) -> None:
        """Set the description of the current work and the number of completed steps."""
        with self._lock:
            self._doing = doing or self._doing
            self._done = self._done if done is None else done
            self._total = self._total if total is None else total
            self._draw()

    def step(self, doing: str = "") -> None:
        """Count a completed step."""
        with self._lock:
            self._done += 1
            self._doing = doing or self._doing
            self._draw()

    def say(self, line: str, stream: TextIO | None = None) -> None:
        """Print a line that stays: to the progress's stream or to ``stream``."""
        target = self._stream if stream is None else stream
        with self._lock:
            self._said = time.monotonic()
            if self._bar is not None:
                self._bar.write(line, file=target)
            else:
                print(line, file=target, flush=True)

    def close(self) -> None:
        """Stop showing progress, and remove the bar."""
        self._ended.set()
        self._ticker.join()
        with self._lock:
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self) -> None:
        if self._bar is None:
            return
        self._bar.total, self._bar.n = self._total, self._done
        self._bar.set_postfix_str(self._doing[:WIDEST], refresh=True)

    def _tick(self) -> None:
        while not self._ended.wait(min(self._every_s, REFRESH_S)):
            with self._lock:
                now = time.monotonic()
                if self._bar is not None:
                    self._bar.refresh()
                elif now - self._said >= self._every_s:
                    self._said = now
                    print(self._line(now), file=self._stream, flush=True)

    def _line(self, now: float) -> str:
        parts = [f"{now - self._begun:.0f} s so far"]
        if self._total:
            parts.append(f"{self._done} of {self._total} {self._unit}")
        elif self._done:
            parts.append(f"{self._done} {self._unit}")
        return f"{self._name}: {', '.join(parts)}{self._doing and ': '}{self._doing[:WIDEST]}"


def _follow(progress: Progress, log: Path, at: int) -> int:
    """Read a log from an offset on. Return the new offset."""
    with log.open("rb") as file:
        file.seek(at)
        new = file.read()
    whole = new.rpartition(b"\n")[0]
    for raw in whole.decode(errors="replace").splitlines():
        line = _ESCAPES.sub("", raw).strip()
        match = _STEPS.match(line)
        numbers = [int(text) for text in match.groups() if text] if match else [None, None]
        if line:
            progress.update(line, done=numbers[0], total=numbers[1])
    return at + len(whole) + (1 if whole else 0)


_ENDING = (signal.SIGINT, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its session. If only a shell were ended, its children would go on."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Return a context that delays signals that would end this process until the context ends.

    A signal mask does not do this: another thread would get the signal, and Python would raise in
    the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signal handlers run in the main thread, so nothing is raised here
        return
    came: list[int] = []
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in _ENDING}
    try:
        yield
    finally:
        for ending, handler in before.items():
            signal.signal(ending, signal.SIG_DFL if handler is None else handler)
        for number in came[:1]:
            signal.raise_signal(number)


def _on_sigterm(number: int, _: object) -> None:
    sys.exit(128 + number)


def run(
    name: str,
    command: Sequence[str | Path],
    log: Path,
    *,
    stdout: BinaryIO | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    stream: TextIO | None = None,
    every_s: float = EVERY_S,
) -> int:
    """Run a command with its output in a file, and show its progress. Return its exit status.

    Args:
        log: output file; overwritten.
        stdout: file for stdout, which is not searched for progress; None: the log.
        env: environment of the command; None: this process's.
        stream, every_s: see Progress.

    Raises:
        subprocess.TimeoutExpired: the command ran longer than ``timeout_s``, and was ended.
    """
    words = [str(word) for word in command]
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with log.open("wb") as output, Progress(name, stream=stream, every_s=every_s) as progress:
        process = None
        at = 0
        try:
            # Without this context, a signal before the process object exists would leave the
            # command running.
            with _signals_wait():
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout or output,
                    stderr=output,
                    env=env,
                    # In a session of its own, the command does not get Ctrl-C. This process gets
                    # it, and ends its children.
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            while True:
                try:
                    status = process.wait(0.1)
                    break
                except subprocess.TimeoutExpired:
                    at = _follow(progress, log, at)
                if deadline is not None and time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(words, timeout_s or 0.0)
        finally:
            if process is not None and process.poll() is None:
                with _signals_wait():
                    _end(process)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Runs a command with its output in a file, and shows how far it is. Its exit "
        "status is the command's; when it fails, the end of its output is shown."
    )
    parser.add_argument("--name", required=True, help="what it is, in a word or two")
    parser.add_argument("--log", required=True, type=Path, help="the file for its output")
    parser.add_argument(
        "--show-end", type=int, default=0, metavar="N", help="print its last lines when all is well"
    )
    parser.add_argument("command", nargs="+", help="the command, after --")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        status = run(options.name, options.command, options.log)
    except OSError as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 127
    except KeyboardInterrupt:
        return 130
    lines = options.log.read_text(errors="replace").splitlines()
    if status == 0 and options.show_end:
        print("\n".join(lines[-options.show_end :]))
    if status != 0:
        lines = lines[-LAST_LINES:]
        print(
            f"{options.name} FAILED; the end of {options.log}:", *lines, sep="\n", file=sys.stderr
        )
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
