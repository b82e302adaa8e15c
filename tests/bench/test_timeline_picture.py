"""bench/timeline/picture.py: what it reads out of timelines and profiles, and the picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.timeline import picture as timeline

SCRIPT = Path(timeline.__file__)

TIMELINE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "worker 0"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "push loop 0"}},
        {"ph": "b", "name": "server", "pid": 1, "tid": 0, "ts": 5000, "id2": {"local": "3"}},
        {"ph": "X", "name": "push", "pid": 1, "tid": 1, "ts": 2000, "dur": 1500},
        {"ph": "e", "name": "server", "pid": 1, "tid": 0, "ts": 9000, "id2": {"local": "3"}},
    ]
}
PROFILE = {
    "baseTimeNanoseconds": 1_000_000,
    "traceEvents": [
        {"ph": "X", "cat": "kernel", "ts": 500, "dur": 250, "args": {"device": 0, "stream": 7}},
        {"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 1, "args": {}},
    ],
}


def test_slices_and_waiting_are_read() -> None:
    push, server = timeline.read_timeline(TIMELINE)
    assert (push.track, push.kind) == ("worker 0: push loop 0", "push")
    assert (push.begin, push.end) == (2.0, 3.5)
    assert (server.kind, server.begin, server.end) == ("server", 5.0, 9.0)
    assert timeline.within([push, server], 2.0, None) == [server]
    assert timeline.within([push, server], None, 1.0) == [push]


def test_kernels_are_read_by_the_same_clock() -> None:
    (kernel,) = timeline.read_profile(PROFILE)
    assert kernel.track == "GPU 0, stream 7: kernels"
    assert (kernel.begin, kernel.end) == (1.5, 1.75)


def test_without_kernels_the_outermost_operators_are_read() -> None:
    def operator(name: str, ts: float, dur: float, tid: int = 1) -> dict[str, object]:
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": tid}

    node = "autograd::engine::evaluate_function: MmBackward0"
    events = [operator("aten::mm", 12, 3), operator(node, 10, 10), operator("aten::add", 20, 1)]
    events.append(operator("aten::mul", 12, 2, tid=2))
    read = timeline.read_profile({"traceEvents": events})
    assert [(s.track, round(s.begin * 1e3)) for s in read] == [
        ("CPU: backward", 10),
        ("CPU: other computation", 12),
        ("CPU: other computation", 20),
    ]


@pytest.mark.parametrize("trace", [{}, {"traceEvents": [{"ph": "X"}]}])
def test_other_traces_are_errors(trace: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no timeline"):
        timeline.read_timeline(trace)


def test_picture(tmp_path: Path) -> None:
    worker, profile, picture = tmp_path / "w.json", tmp_path / "p.json", tmp_path / "x.png"
    worker.write_text(json.dumps(TIMELINE))
    profile.write_text(json.dumps(PROFILE))
    command = [sys.executable, str(SCRIPT), str(worker), "--profile", str(profile)]
    subprocess.run([*command, "-o", str(picture)], check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    late = subprocess.run(
        [*command, "-o", str(picture), "--begin-ms", "100"], capture_output=True, text=True
    )
    assert late.returncode == 1
    assert "nothing happened" in late.stderr
