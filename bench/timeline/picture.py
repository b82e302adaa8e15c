#!/usr/bin/env python3
"""Draw a timeline as a picture: what each thread of a worker did, and when.

Takes the files that BYTEPS_TRACE_ON=1 writes (or what scripts/merge_traces.py made of them). With
--profile, a trace of torch.profiler of the same process is laid above, so that backward, copies,
pushes and pulls are seen side by side: its kernels, by CUDA stream, or on a CPU what the
backward pass and all else computed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.timeline.report import stages_of
from megatron_byteps_ray import profiling

COLORS = {
    "push": "tab:blue",
    "pull": "tab:green",
    "copy": "tab:orange",
    "add": "tab:purple",
    "kernel": "tab:gray",
    "backward": "tab:red",
    "other computation": "tab:gray",
    "server": "tab:cyan",
}


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Work of one track."""

    track: str
    kind: str
    """A key of COLORS."""
    begin: float
    """Milliseconds since the epoch."""
    end: float


def _names(events: list[dict[str, Any]], what: str) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == what
    }


def read_timeline(trace: dict[str, Any]) -> list[Slice]:
    """The threads' slices, and the time that each partition was with the servers.

    Raises:
        ValueError: it is no timeline of BytePS.
    """
    try:
        events = trace["traceEvents"]
        threads = _names(events, "thread_name")
        processes = {pid: name for (pid, _), name in _names(events, "process_name").items()}
        slices = [
            Slice(
                track=f"{processes[event['pid']]}: {threads[event['pid'], event['tid']]}",
                kind=event["name"],
                begin=event["ts"] / 1e3,
                end=(event["ts"] + event["dur"]) / 1e3,
            )
            for event in events
            if event["ph"] == "X"
        ]
        slices += [
            Slice(
                track=f"{processes[pid]}: on the network and with the servers",
                kind=stage.name,
                begin=stage.begin,
                end=stage.end,
            )
            for (pid, _), stage in stages_of(events)
            if stage.name == "server"
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"no timeline of BytePS: {error!r}") from error
    return slices


def read_profile(trace: dict[str, Any]) -> list[Slice]:
    """The kernels of a trace of torch.profiler, by CUDA stream; without any, what was computed on
    the CPU.

    Raises:
        ValueError: it is no such trace.
    """
    try:
        base = trace.get("baseTimeNanoseconds", 0) / 1e6
        kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
        computed = kernels or _outermost(
            event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"
        )
        return [
            Slice(
                track=_track_of(event),
                kind=_kind_of(event),
                begin=base + event["ts"] / 1e3,
                end=base + (event["ts"] + event["dur"]) / 1e3,
            )
            for event in computed
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"no trace of torch.profiler: {error!r}") from error


def _outermost(operators: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that no other one of their thread has called."""
    found: list[dict[str, Any]] = []
    ends: dict[int, float] = {}  # by thread
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= ends.get(event["tid"], 0.0):
            found.append(event)
            ends[event["tid"]] = event["ts"] + event["dur"]
    return found


def _track_of(event: dict[str, Any]) -> str:
    """Sorted above the workers' tracks."""
    if event["cat"] == "kernel":
        return f"GPU {event['args']['device']}, stream {event['args']['stream']}: kernels"
    return "CPU: backward" if _kind_of(event) == "backward" else "CPU: other computation"


def _kind_of(event: dict[str, Any]) -> str:
    if event["cat"] == "kernel":
        return "kernel"
    in_backward = event["name"].startswith("autograd::engine")
    return "backward" if in_backward else "other computation"


def within(slices: list[Slice], begin: float | None, end: float | None) -> list[Slice]:
    """What happened between these milliseconds after the first slice; None: no limit."""
    origin = min((s.begin for s in slices), default=0.0)
    first = origin + (begin or 0.0)
    last = float("inf") if end is None else origin + end
    return [s for s in slices if s.end >= first and s.begin <= last]


def draw(slices: list[Slice], title: str, output: Path) -> None:
    """Write the picture; its type is that of the file's name."""
    # Here, because matplotlib takes a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    tracks = sorted({s.track for s in slices}, key=lambda track: (":" not in track, track))
    origin = min(s.begin for s in slices)
    figure = Figure(figsize=(14, 1.5 + 0.32 * len(tracks)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, track in enumerate(tracks):
        for kind, color in COLORS.items():
            bars = [
                (s.begin - origin, s.end - s.begin)
                for s in slices
                if s.track == track and s.kind == kind
            ]
            # With an edge, so that what takes microseconds is seen.
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, edgecolors=color, lw=0.5)
    axes.set_yticks(range(len(tracks)), tracks, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title)
    seen = {s.kind for s in slices}
    patches = [Patch(color=color, label=kind) for kind, color in COLORS.items() if kind in seen]
    figure.legend(
        handles=patches, loc="outside lower center", fontsize=8, ncols=len(patches), frameon=False
    )
    figure.savefig(output, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="byteps-*.json of BYTEPS_TRACE_DIR")
    parser.add_argument("--profile", type=Path, action="append", default=[], help="torch's trace")
    parser.add_argument("-o", "--output", type=Path, required=True, help="picture to write (.png)")
    parser.add_argument("--begin-ms", type=float, help="leave out what was before (default: none)")
    parser.add_argument("--end-ms", type=float, help="leave out what came later (default: none)")
    parser.add_argument("--title", default="", help="above the picture")
    arguments = parser.parse_args()
    slices: list[Slice] = []
    for files, read in ((arguments.files, read_timeline), (arguments.profile, read_profile)):
        for file in files:
            try:
                slices += read(profiling.read(file))
            except (OSError, ValueError) as error:
                print(f"error: {file}: {error}", file=sys.stderr)
                return 1
    slices = within(slices, arguments.begin_ms, arguments.end_ms)
    if not slices:
        print("error: nothing happened in that time", file=sys.stderr)
        return 1
    draw(slices, arguments.title, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
