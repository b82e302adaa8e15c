"""scripts/progress.py: lines in a log, a bar on a terminal, and the command's own exit status."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import progress

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/progress.py"

LATEST_S = 60.0


def wait_for(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LATEST_S
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_log_gets_lines() -> None:
    log = io.StringIO()
    with progress.Progress("bench", total=5, unit="launches", stream=log, every_s=0.01) as shown:
        shown.update("launch 2 gloo", done=3)
        wait_for(lambda: "3 of 5 launches: launch 2 gloo\n" in log.getvalue())
        shown.step()
        wait_for(lambda: "4 of 5 launches: launch 2 gloo\n" in log.getvalue())
        shown.say("p50 3 ms")
    lines = log.getvalue().splitlines()
    assert "p50 3 ms" in lines
    assert all(line.startswith("bench: ") for line in lines if line != "p50 3 ms")


def test_a_terminal_gets_a_bar() -> None:
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 100))
    seen: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(leader, 4096):
                seen.append(chunk)
        except OSError:  # how Linux says that the other end is closed
            pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with (
        os.fdopen(follower, "w") as terminal,
        progress.Progress("bench", total=4, unit="launches", stream=terminal) as shown,
    ):
        shown.update("launch 1 gloo", done=1)
        wait_for(lambda: b"25%|" in b"".join(seen) and b"launch 1 gloo" in b"".join(seen))
        shown.say("a line")
        wait_for(lambda: b"a line" in b"".join(seen))
    reader.join(LATEST_S)
    os.close(leader)


@pytest.mark.parametrize("line", ["[3/8] Building CXX object", "STEP 3/8: RUN apt-get"])
def test_how_far_a_command_says_it_is(tmp_path: Path, line: str) -> None:
    go, log = tmp_path / "go", io.StringIO()
    program = f"echo '{line}'; while ! [ -e {go} ]; do sleep 0.02; done; echo last; exit 3"
    ended: list[int] = []

    def run() -> None:
        command, output = ["sh", "-c", program], tmp_path / "out"
        ended.append(progress.run("build", command, output, stream=log, every_s=0.01))

    runner = threading.Thread(target=run)
    try:
        runner.start()
        wait_for(lambda: f"3 of 8 steps: {line}\n" in log.getvalue())
    finally:
        go.touch()
        runner.join(LATEST_S)
    assert ended == [3]
    assert (tmp_path / "out").read_text() == f"{line}\nlast\n"


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        progress.run(
            "wait", ["sleep", "600"], tmp_path / "out", timeout_s=0.2, stream=io.StringIO()
        )


def test_nothing_is_left_of_a_command_that_is_ended(tmp_path: Path) -> None:
    here = tmp_path / "pid"
    command = [SCRIPT, "--name", "it", "--log", tmp_path / "log", "--"]
    # A shell that waits for a child, as scripts do.
    program = f"sleep 600 & echo $! >{here}.new; mv {here}.new {here}; wait; true"
    running = subprocess.Popen([sys.executable, *map(str, command), "sh", "-c", program])
    wait_for(here.exists)
    running.terminate()
    assert running.wait(LATEST_S) == 143
    pid = int(here.read_text())
    wait_for(lambda: not runs(pid))


ENDED_WHILE_IT_STARTS = """
import os, pathlib, signal, subprocess, sys, threading, time
from scripts import progress

class Popen(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        while not pathlib.Path(sys.argv[1]).exists():
            time.sleep(0.01)
        # Whichever thread gets it, the main one raises.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)

threading.Thread(target=time.sleep, args=[600], daemon=True).start()
progress.subprocess.Popen = Popen
sys.exit(progress.main(sys.argv[2:]))
"""


def test_nothing_is_left_of_a_command_that_has_just_begun(tmp_path: Path) -> None:
    here = tmp_path / "pid"
    program = f"sleep 600 & echo $! >{here}.new; mv {here}.new {here}; wait; true"
    command = [here, "--name", "it", "--log", tmp_path / "log", "--", "sh", "-c", program]
    ended = subprocess.run(
        [sys.executable, "-c", ENDED_WHILE_IT_STARTS, *map(str, command)],
        timeout=LATEST_S,
    )
    assert ended.returncode == 143
    pid = int(here.read_text())
    wait_for(lambda: not runs(pid))


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("echo one; echo two", 0, "two\n"),
        ("echo one; exit 7", 7, ""),
        ("kill -9 $$", 137, ""),
    ],
)
def test_the_script(tmp_path: Path, program: str, status: int, said: str) -> None:
    command = [SCRIPT, "--name", "it", "--log", tmp_path / "log", "--show-end", "1", "--"]
    done = subprocess.run(
        [sys.executable, *map(str, command), "sh", "-c", program],
        capture_output=True, text=True, check=False, timeout=LATEST_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (status, said)
    if status == 7:
        assert "it FAILED" in done.stderr and "one" in done.stderr
