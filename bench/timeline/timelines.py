"""What timelines of BytePS have of partitions (BYTEPS_TRACE_ON=1, docs/use/observability.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Row = tuple[int, str]
"""A process's number, and that of one of its partitions in one round."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A partition's stay in one stage. Milliseconds since the epoch."""

    name: str
    begin: float
    end: float


def row_of(event: dict[str, Any]) -> Row | None:
    """What an event of a partition is of; None for other events."""
    return (event["pid"], event["id2"]["local"]) if event["ph"] in ("b", "e") else None


def stages_of(events: Iterable[dict[str, Any]]) -> Iterator[tuple[Row, Stage]]:
    """In the order in which they ended. Raises KeyError for what is no timeline of BytePS."""
    begun: dict[tuple[Row, str], float] = {}
    for event in events:
        row = row_of(event)
        if row is None or "args" in event:  # which tells of the whole way
            continue
        name, at = event["name"], event["ts"] / 1e3
        if event["ph"] == "b":
            begun[row, name] = at
        elif (row, name) in begun:
            yield row, Stage(name=name, begin=begun.pop((row, name)), end=at)
