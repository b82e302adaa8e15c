"""Lays timelines of BytePS and traces of torch.profiler beside each other, for ui.perfetto.dev."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FIRST_PROCESS = 2_000_000
"""Above what BytePS numbers its processes by: workers from 1, servers from 1,000,001."""
_RANK = re.compile(r"rank(\d+)")


def merge(files: Sequence[Path]) -> dict[str, Any]:
    """One timeline with the events of all files.

    Times become microseconds since the epoch, as BytePS writes them: those of one host belong
    together, those of several hosts as far as their clocks agree.

    Raises:
        ValueError: a file is no timeline; the text names it.
    """
    events: list[dict[str, Any]] = []
    processes = _FIRST_PROCESS
    for file in files:
        try:
            trace = json.loads(file.read_text(encoding="utf-8"))
            if "schemaVersion" in trace:
                own, processes = _of_torch(trace, _title(file), processes)
            else:
                own = list(trace["traceEvents"])
            events += own
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is no timeline of BytePS, nor a trace of torch.profiler: {error!r}"
            ) from error
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _title(file: Path) -> str:
    rank = _RANK.search(file.stem)
    return f"rank {rank[1]}" if rank else file.stem


def _of_torch(
    trace: dict[str, Any], title: str, processes: int
) -> tuple[list[dict[str, Any]], int]:
    """The events of one process, with numbers of its own for what torch takes for processes:
    several ranks have a GPU 0, and each has "Spans".

    Returns:
        the events, and the next number that is free.
    """
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    numbers: dict[Any, int] = {}
    events = []
    for event in trace["traceEvents"]:
        event = dict(event)
        if "pid" in event:
            event["pid"] = numbers.setdefault(event["pid"], processes + len(numbers))
        if event.get("ph") != "M" and "ts" in event:
            event["ts"] += base
        # An arrow's number is its process's own.
        if event.get("ph") in ("s", "t", "f") and "id" in event:
            event["id"] = f"{title}/{event['id']}"
        if event.get("name") == "process_name":
            event["args"] = {"name": f"{title}: {event['args']['name']}"}
        events.append(event)
    return events, processes + len(numbers)
