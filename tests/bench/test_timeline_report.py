"""bench/timeline/report.py: what it reads out of a timeline, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.timeline import report as timeline_report

SCRIPT = Path(timeline_report.__file__)
MB = 1_000_000


def partition(
    number: int, begin: float, *stages: tuple[str, float], pid: int = 1, nbytes: int = MB
) -> list[dict[str, Any]]:
    """Events of a partition that passed these stages one after the other, of so many ms each."""

    def event(ph: str, name: str, at: float, **more: Any) -> dict[str, Any]:
        row = {"pid": pid, "tid": 0, "ts": at * 1e3, "id2": {"local": str(number)}}
        return {"ph": ph, "name": name, "cat": "partition", **row, **more}

    whole = {"tensor": "grads", "round": 0, "bytes": nbytes}
    events = [event("b", "grads", begin, args=whole)]
    for name, ms in stages:
        events += [event("b", name, begin), event("e", name, begin + ms)]
        begin += ms
    return [*events, event("e", "grads", begin)]


def trace_of(*events: list[dict[str, Any]]) -> dict[str, Any]:
    names = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in ((1, "worker 0"), (1000001, "server 0"))
    ]
    return {"traceEvents": names + [event for part in events for event in part]}


WORKER = trace_of(
    # Nothing goes up from 0 to 3, from 7 to 8, and from 12 to 20.
    partition(0, 0, ("compute", 2), ("copy from GPU", 1), ("push", 4), ("server", 8)),
    partition(1, 0, ("compute", 2), ("queue", 6), ("push", 4), ("server", 8)),
)


def test_stages_that_are_empty_are_seen() -> None:
    ways = timeline_report.ways_of(WORKER)
    assert [(way.begin, way.end, way.nbytes) for way in ways] == [(0, 15, MB), (0, 20, MB)]
    found = timeline_report.occupancies(ways)
    assert list(found) == ["compute", "copy from GPU", "push", "server", "queue"]
    assert (found["push"].partition_ms, found["push"].empty_ms) == (8, 20 - 8)
    assert (found["server"].partition_ms, found["server"].empty_ms) == (16, 7)
    assert (found["compute"].partition_ms, found["compute"].empty_ms) == (4, 18)


def test_when_the_first_and_the_last_partition_leave_a_stage() -> None:
    assert timeline_report.departures(timeline_report.ways_of(WORKER)) == {
        "compute": [(2, 2)],
        "copy from GPU": [(3, 3)],
        "queue": [(8, 8)],
        "push": [(7, 12)],
        "server": [(15, 20)],
    }
    table = timeline_report.stage_table(timeline_report.ways_of(WORKER), 20)
    assert table[3] == ("push", "4.000", "4.000", "0.4", "60%", "7.000", "12.000")


def test_the_reason_is_what_is_next_to_the_push() -> None:
    assert timeline_report.standstills(timeline_report.ways_of(WORKER)) == {
        "the GPU was computing what is sent": 2,
        "partitions were being copied from the GPU": 1,
        "partitions waited for room in a server's window, or for a push loop": 1,
        "there was nothing to send": 8,
    }


def test_a_partition_that_failed_ends_where_it_was() -> None:
    trace = trace_of(partition(0, 5, ("queue", 1), ("push", 2)))
    trace["traceEvents"][2]["args"]["failed"] = True
    (way,) = timeline_report.ways_of(trace)
    assert (way.failed, way.end) == (True, 8)
    assert "; 1 failed" in timeline_report.report("worker 0", [way])


def test_the_report_of_workers_and_servers(tmp_path: Path) -> None:
    both = trace_of(
        WORKER["traceEvents"][2:],
        partition(0, 4, ("receive queue", 1), ("add", 2), ("answer", 1), pid=1000001),
    )
    file = tmp_path / "timeline.json"
    file.write_text(json.dumps(both))
    command = [sys.executable, str(SCRIPT), str(file)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    worker, server = said[said.index("worker 0") :], said[: said.index("worker 0")]
    assert "worker 0: 2 partitions of 1 tensors, 2.0 MB in 20.0 ms" in worker
    assert "up: from 3.0 to 12.0 ms, 1.778 Gbit/s" in worker
    assert "down: the first sum at 15.0 ms, the last at 20.0 ms, 3.200 Gbit/s" in worker
    assert worker.index("8.0 ms: there was nothing to send") < worker.index("2.0 ms: the GPU was")
    assert "receive queue" in server and "up:" not in server
    none = subprocess.run([*command, "--tensor", "x"], capture_output=True, text=True)
    assert (none.returncode, none.stderr) == (1, "error: no partition was recorded\n")


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": [{"ph": "b", "cat": "partition"}]}'])
def test_other_files_are_errors(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "x.json")], capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "x.json" in ended.stderr and "no timeline of BytePS" in ended.stderr
