"""Merges traces of torch; tests/multiproc/test_timeline.py has BytePS's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megatron_byteps_ray import traces


def _of_torch(file: Path, rank: int, base_ns: int) -> Path:
    """A trace as torch.profiler writes it: one operation, 250 us long, half a second in."""
    place = {"pid": 77, "tid": 77}
    arrow = {"ph": "s", "id": 3, "cat": "fwdbwd", "name": "fwdbwd", **place}
    end = {"ph": "i", "name": "Record Window End", "pid": "Traces", "tid": 1, "ts": 600_000}
    events = [
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "mm", **place, "ts": 500_000.125, "dur": 250.0},
        {**arrow, "ts": 500_001},
        end,
    ]
    trace = {"baseTimeNanoseconds": base_ns, "traceEvents": events}
    trace["distributedInfo"] = {"rank": rank}
    with gzip.open(file, "wt") as stream:
        json.dump(trace, stream)
    return file


def test_merging_with_traces_of_torch(tmp_path: Path) -> None:
    """Times of both meet, and processes and arrows of different files stay apart."""
    moment = 1_790_000_000 * 10**9  # since 1970, in nanoseconds
    ours = tmp_path / "byteps-worker-0.json"
    partition = {"ph": "b", "cat": "partition", "name": "g.0", "pid": 1, "tid": 0}
    # While the first rank's operation runs.
    events = [{**partition, "ts": moment / 1000 + 1_500_100}]
    ours.write_text(json.dumps({"traceEvents": events}))
    files = [
        _of_torch(tmp_path / "a.json.gz", 0, moment + 10**9),
        ours,
        _of_torch(tmp_path / "b.json.gz", 1, moment + 2 * 10**9),
    ]
    merged = traces.merge(files)["traceEvents"]
    assert len(merged) == 4 + 1 + 4 + 2  # "Traces" had no name
    first, second = (event for event in merged if event["name"] == "mm")
    (push,) = (event for event in merged if event["name"] == "g.0")
    assert (first["ts"], second["ts"]) == (500_000.125, 1_500_000.125)
    assert first["ts"] < push["ts"] < first["ts"] + first["dur"]
    assert push["pid"] == 1
    names = {e["pid"]: e["args"]["name"] for e in merged if e["name"] == "process_name"}
    assert names[first["pid"]] == "torch, rank 0: python"
    assert names[second["pid"]] == "torch, rank 1: python"
    assert len(names) == 4
    assert len({event["id"] for event in merged if event["ph"] == "s"}) == 2
    (tmp_path / "cut.json.gz").write_bytes(files[0].read_bytes()[:50])
    with pytest.raises(ValueError, match=r"cut.json.gz is no timeline"):
        traces.merge([tmp_path / "cut.json.gz"])
