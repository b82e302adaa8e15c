"""Every wait of worker, servers and scheduler ends in every way, in simulated jobs.

See byteps/tests/simulation/each_wait.h. The jobs also report the waits that they reach.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests import native
from tests.house.test_waits import CODE, WAIT_IN_CPP

SIMULATED = ("engine", "server/sum_thread.cc", "net/membership", "base")
"""Folders and files of which the simulation uses the real code. Connections are simulated."""
NEVER_REACHED = {
    ("base/log.cc", "sleep_for"): "the log is a file, which has room",
    ("base/log.cc", "empty_.WaitFor"): "a process flushes it that ends",
    ("base/memory_reserve.h", "sleep_for"): "there is memory",
    ("base/mutex.h", "cond_.Wait"): "a queue's wait has the place of who takes from the queue",
    ("engine/declarations.cc", "cond_.Wait(&mu_, ["): "a worker has one thread that declares",
    ("engine/operations.cc", "ended_.WaitFor"): "a worker stops when its operations have ended",
    ("engine/operation.cc", "written_.Wait"): "writers of a failed operation end at once",
    ("engine/operation_trace.cc", "cond_.WaitFor"): "slices of a failed operation end at once",
    ("engine/staged_sum.cc", "sent_.WaitUntil"): "the played network keeps no values",
    (
        "net/membership/heartbeat_thread.cc",
        "join",
    ): "a tail call, which leaves no frame on the stack",
}
"""For each file and part of a line: the reason why these jobs never reach the line."""
LIMIT_S = 280
EXHAUSTIVE_LIMIT_S = 3000


def end_each_wait(*arguments: str, limit_s: float = LIMIT_S) -> dict[str, dict[str, int]]:
    """Run the simulation; get the number of ended waits by place in the code and way to end."""
    program = native.build("simulate") / "simulate"
    command: list[str | Path] = [program, "--each-wait", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert ended.returncode == 0, f"{ended.stdout[-6000:]}{ended.stderr[-2000:]}"
    rows = re.findall(r"^\| (place|\S+:\d+) \|(.*)\|$", ended.stdout, re.M)
    ways = [way.strip() for way in rows[0][1].split("|")]
    return {wait: dict(zip(ways, map(int, row.split("|")), strict=True)) for wait, row in rows[1:]}


def places_of_waits() -> dict[str, str]:
    """Find the waiting lines in the simulated code, by place."""
    waits = {}
    for path in sorted(CODE.rglob("*")):
        name = path.relative_to(CODE).as_posix()
        if path.suffix not in (".h", ".cc") or not name.startswith(SIMULATED):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if WAIT_IN_CPP.search(line) and not line.lstrip().startswith("//"):
                waits[f"{name}:{number}"] = line
    return waits


def is_exempt(wait: str, line: str) -> bool:
    file = wait.split(":")[0]
    return any(name == file and what in line for name, what in NEVER_REACHED)


@pytest.mark.slow
def test_waits_end_in_each_way() -> None:
    """Ends some waits at each place; `make simulate ARGS=--each-wait` ends all of them."""
    ended = end_each_wait("--seeds", "25", "--most", "1")
    waits = places_of_waits()
    assert len(waits) > len(NEVER_REACHED)
    missed = {
        wait: line.strip()
        for wait, line in waits.items()
        if wait not in ended and not is_exempt(wait, line)
    }
    assert not missed
    for wait, times in ended.items():
        # An ending thread is not woken before, and the first wait may be the scheduler's.
        unended = {way for way, number in times.items() if number == 0}
        assert unended <= {"woken", "job fails"}, f"{wait} was not ended in each way: {times}"


def test_waits_of_servers_with_copies_end_in_each_way() -> None:
    assert end_each_wait("--backups", "--seeds", "4", "--most", "1")


@pytest.mark.thorough
@pytest.mark.parametrize("jobs", [(), ("--backups",)])
def test_all_waits_end_in_each_way(jobs: tuple[str, ...]) -> None:
    assert end_each_wait(*jobs, "--seeds", "30", limit_s=EXHAUSTIVE_LIMIT_S)
