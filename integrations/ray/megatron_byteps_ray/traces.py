"""Lay the timelines of a job's processes side by side, for ui.perfetto.dev.

Takes those of BytePS and traces of torch.profiler (.json or .json.gz). Times of one host belong
together, those of several hosts as far as their clocks agree.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NS_PER_US = 1000
_FIRST_TORCH_PROCESS = 2_000_001
"""BytePS numbers its workers from 1, its servers from 1,000,001."""
_RANK = re.compile(r"rank(\d+)")


def merge(files: Sequence[Path]) -> dict[str, Any]:
    """One timeline with the events of all files, ``.json`` or ``.json.gz``.

    BytePS writes times since 1970, torch since a moment that its file names. Where there are
    traces of torch, all times count from the earliest of those moments, so that fractions of a
    microsecond fit into a number.

    Raises:
        ValueError: a file is no timeline; the text names it.
    """
    traces = [read(file) for file in files]
    bases = [trace["baseTimeNanoseconds"] for trace in traces if _is_of_torch(trace)]
    origin = min(bases, default=0)
    events: list[Any] = []
    processes = 0
    for number, (file, trace) in enumerate(zip(files, traces, strict=True)):
        if not _is_of_torch(trace):
            events += _shifted(trace["traceEvents"], -origin / _NS_PER_US)
            continue
        shift = (trace["baseTimeNanoseconds"] - origin) / _NS_PER_US
        own = _shifted(trace["traceEvents"], shift)
        name = _name(file, trace, own)
        processes += _set_apart(own, number, _FIRST_TORCH_PROCESS + processes, name)
        events += own
    return {"displayTimeUnit": "ms", "traceEvents": events}


def read(file: Path) -> dict[str, Any]:
    """A timeline of BytePS or a trace of torch.profiler, also of one that was compressed.

    Raises:
        ValueError: it is neither; the text names the file.
    """
    try:
        raw = file.read_bytes()
        text = gzip.decompress(raw) if file.suffix == ".gz" else raw
        trace = json.loads(text)
        if not all(isinstance(event, dict) for event in trace["traceEvents"]):
            raise TypeError("its events are no objects")
    except (ValueError, KeyError, TypeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{file} is no timeline of BytePS or torch: {error!r}") from error
    return trace


def _is_of_torch(trace: dict[str, Any]) -> bool:
    return "baseTimeNanoseconds" in trace


def _name(file: Path, trace: dict[str, Any], events: Sequence[dict[str, Any]]) -> str:
    """Of the process in the viewer."""
    rank = trace.get("distributedInfo", {}).get("rank")
    if rank is not None:
        return f"rank {rank}"
    if in_name := _RANK.search(file.name):
        return f"rank {in_name[1]}"
    pids = [event["pid"] for event in events if isinstance(event.get("pid"), int)]
    return f"process {pids[0]}" if pids else "process"


def _shifted(events: Sequence[dict[str, Any]], shift: float) -> list[dict[str, Any]]:
    if not shift:
        return list(events)
    return [{**event, "ts": event["ts"] + shift} if "ts" in event else event for event in events]


def _set_apart(events: list[dict[str, Any]], file: int, first: int, name: str) -> int:
    """Give processes and arrows of a trace numbers that no other file has; returns how many
    processes there are. Those without a name get one."""
    numbers: dict[object, int] = {}
    named = set()
    for event in events:
        if "pid" in event:
            event["pid"] = numbers.setdefault(event["pid"], first + len(numbers))
        if "id" in event:
            event["id"] = f"{file}.{event['id']}"
        if event.get("name") == "process_name":
            event["args"] = {"name": f"torch, {name}: {event['args']['name']}"}
            named.add(event["pid"])
    for pid, number in numbers.items():
        if number not in named:
            args = {"name": f"torch, {name}: {pid}"}
            events.append({"ph": "M", "name": "process_name", "pid": number, "args": args})
    return len(numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", nargs="+", type=Path, help="byteps-*.json of BYTEPS_TRACE_DIR, torch's traces"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()
    try:
        text = json.dumps(merge(arguments.files), ensure_ascii=False)
        arguments.output.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
