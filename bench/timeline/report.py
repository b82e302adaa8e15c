#!/usr/bin/env python3
"""Say what held up a worker's sums: tables out of the timelines that BYTEPS_TRACE_ON=1 writes.

Of each process: how many partitions were in each stage, how long, for how much of the time none
was, and when a tensor's first partition and its last one left the stage, since the tensor was
begun. Of each worker also: when it began to push and when it got the last sum, and where partitions
were while none was being pushed.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_byteps_ray import profiling
from scripts.progress import aligned

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


PUSH, SERVER = "push", "server"
BEFORE_PUSH = {
    "copy from GPU": "partitions were being copied from the GPU",
    "queue": "partitions waited for room in a server's window, or for a push loop",
    "compute": "the GPU was computing what is sent",
}
"""Stages of a worker before the push, from the one next to it on."""
NOTHING = "there was nothing to send"


@dataclass(frozen=True, kw_only=True)
class Way:
    """What one process told of one partition in one round."""

    process: str
    tensor: str
    round: int
    nbytes: int
    failed: bool
    stages: tuple[Stage, ...]
    """One after the other, without a gap."""

    @property
    def begin(self) -> float:
        return self.stages[0].begin

    @property
    def end(self) -> float:
        return self.stages[-1].end


def ways_of(trace: dict[str, Any]) -> list[Way]:
    """Of all processes whose timelines are in the trace.

    Raises:
        ValueError: it is no timeline of BytePS.
    """
    try:
        return _ways_of(trace["traceEvents"])
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no timeline of BytePS: {error!r}") from error


def _ways_of(events: Sequence[dict[str, Any]]) -> list[Way]:
    processes: dict[int, str] = {}
    wholes: dict[Row, dict[str, Any]] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif "args" in event and (row := row_of(event)) is not None:
            wholes[row] = event["args"]
    stages: dict[Row, list[Stage]] = defaultdict(list)
    for row, stage in stages_of(events):
        stages[row].append(stage)
    return [
        Way(
            process=processes[row[0]],
            tensor=whole["tensor"],
            round=whole["round"],
            nbytes=whole["bytes"],
            failed=bool(whole.get("failed")),
            stages=tuple(stages[row]),
        )
        for row, whole in wholes.items()
        if stages[row]
    ]


# ----------------------------------------------------------------------------- what was where, when


def levels(ways: Iterable[Way]) -> list[tuple[float, Counter[str]]]:
    """From each of these milliseconds on until the next: how many partitions were in each stage."""
    changes: dict[float, Counter[str]] = defaultdict(Counter)
    for way in ways:
        for stage in way.stages:
            changes[stage.begin][stage.name] += 1
            changes[stage.end][stage.name] -= 1
    now: Counter[str] = Counter()
    found = []
    for at in sorted(changes):
        now.update(changes[at])
        found.append((at, Counter({name: count for name, count in now.items() if count})))
    return found


@dataclass(kw_only=True)
class Occupancy:
    """Of one stage: milliseconds times partitions, and milliseconds in which it held none."""

    partition_ms: float = 0.0
    empty_ms: float = 0.0


def occupancies(ways: Sequence[Way]) -> dict[str, Occupancy]:
    """By stage, in the order in which a partition passes them."""
    found = {stage.name: Occupancy() for way in ways for stage in way.stages}
    for (begin, counts), (end, _) in itertools.pairwise(levels(ways)):
        for name, occupancy in found.items():
            occupancy.partition_ms += counts[name] * (end - begin)
            occupancy.empty_ms += (end - begin) * (counts[name] == 0)
    return found


def departures(ways: Sequence[Way]) -> dict[str, list[tuple[float, float]]]:
    """By stage, of each tensor and round: when the first and the last partition left it, in
    milliseconds since the first of them came to its first stage.
    """
    together: dict[tuple[str, int], list[Way]] = defaultdict(list)
    for way in ways:
        together[way.tensor, way.round].append(way)
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sum_ in together.values():
        begin = min(way.begin for way in sum_)
        ends: dict[str, list[float]] = defaultdict(list)
        for way in sum_:
            for stage in way.stages:
                ends[stage.name].append(stage.end - begin)
        for name, left in ends.items():
            found[name].append((min(left), max(left)))
    return found


def standstills(ways: Sequence[Way]) -> dict[str, float]:
    """Milliseconds in which nothing was being pushed, by what was the matter."""
    found: dict[str, float] = defaultdict(float)
    for (begin, counts), (end, _) in itertools.pairwise(levels(ways)):
        if counts[PUSH]:
            continue
        # What is next to being sent holds up the link: what is behind it would not be sent sooner.
        reasons = [reason for stage, reason in BEFORE_PUSH.items() if counts[stage]]
        found[reasons[0] if reasons else NOTHING] += end - begin
    return dict(found)


# ----------------------------------------------------------------------------- the report


def report(process: str, ways: Sequence[Way]) -> str:
    """Of the partitions of one process."""
    begin, end = min(way.begin for way in ways), max(way.end for way in ways)
    span, total = end - begin, sum(way.nbytes for way in ways)
    failed = sum(way.failed for way in ways)
    lines = [
        f"{process}: {len(ways)} partitions of {len({way.tensor for way in ways})} tensors, "
        f"{total / 1e6:.1f} MB in {span:.1f} ms" + (f"; {failed} failed" if failed else "")
    ]
    lines += [aligned(stage_table(ways, span))]
    if any(stage.name == PUSH for way in ways for stage in way.stages):
        lines += _link(ways, begin, end)
    return "\n".join(lines)


def stage_table(ways: Sequence[Way], span: float) -> list[Sequence[str]]:
    """A row for each stage."""
    table: list[Sequence[str]] = [
        ("stage", "p50 ms", "p99 ms", "partitions in it", "none in it", "first left", "last left")
    ]
    left = departures(ways)
    for name, occupancy in occupancies(ways).items():
        lasted = sorted(s.end - s.begin for way in ways for s in way.stages if s.name == name)
        table.append(
            (
                name,
                f"{statistics.median(lasted):.3f}",
                f"{lasted[min(len(lasted) - 1, int(0.99 * len(lasted)))]:.3f}",
                f"{occupancy.partition_ms / max(span, 1e-9):.1f}",
                f"{occupancy.empty_ms / max(span, 1e-9):.0%}",
                *(f"{statistics.median(times):.3f}" for times in zip(*left[name], strict=True)),
            )
        )
    return table


def _link(ways: Sequence[Way], begin: float, end: float) -> list[str]:
    pushes = [stage for way in ways for stage in way.stages if stage.name == PUSH]
    answers = [stage.end for way in ways for stage in way.stages if stage.name == SERVER]
    first, last = min(stage.begin for stage in pushes), max(stage.end for stage in pushes)
    total = sum(way.nbytes for way in ways)
    lines = [
        f"up: from {first - begin:.1f} to {last - begin:.1f} ms, "
        f"{total * 8 / 1e6 / max(last - first, 1e-9):.3f} Gbit/s"
    ]
    if answers:
        came = max(answers) - min(answers)
        lines.append(
            f"down: the first sum at {min(answers) - begin:.1f} ms, the last at "
            f"{max(answers) - begin:.1f} ms, {total * 8 / 1e6 / max(came, 1e-9):.3f} Gbit/s; "
            f"done {end - max(answers):.1f} ms later"
        )
    for reason, ms in sorted(standstills(ways).items(), key=lambda item: -item[1]):
        lines.append(f"nothing was being pushed for {ms:.1f} ms: {reason}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="byteps-*.json of BYTEPS_TRACE_DIR")
    parser.add_argument("--tensor", default="", help="only tensors with this in their name")
    arguments = parser.parse_args()
    ways: list[Way] = []
    for file in arguments.files:
        try:
            ways += ways_of(profiling.read(file))
        except (OSError, ValueError) as error:
            print(f"error: {file}: {error}", file=sys.stderr)
            return 1
    ways = [way for way in ways if arguments.tensor in way.tensor]
    if not ways:
        print("error: no partition was recorded", file=sys.stderr)
        return 1
    for process in sorted({way.process for way in ways}):
        print(report(process, [way for way in ways if way.process == process]))
        print()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who reads it may have seen enough
    sys.exit(main())
