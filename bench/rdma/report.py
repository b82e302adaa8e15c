"""What was measured, as tables, and compared with the thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.kit.units import show_size

LEAST_SHARE = 0.90
"""Of ib_write_bw, that push_pull has to reach with two planes."""
LEAST_GAIN = 3.0
"""Times that the p99 of a control round trip has to be lower with two planes than with one."""
MOST_IDLE = 0.02
"""Of a core, for any process."""

Table = list[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Bar:
    what: str
    must: str
    value: float
    ok: bool


def goodput_table(result: Mapping[str, Any]) -> Table:
    base = result["goodput"]["ib_write_bw"]
    lines: Table = [("transport", "MB/s, median", "min..max", "of ib_write_bw")]
    for name, values in result["goodput"].items():
        shares = [value / other for value, other in zip(values, base, strict=True)]
        figures = [value / 1e6 for value in values]
        spread = f"{min(figures):.1f}..{max(figures):.1f}"
        lines.append((name, f"{median(figures):.1f}", spread, f"{median(shares):.2f}"))
    return lines


def delay_table(result: Mapping[str, Any]) -> Table:
    lines: Table = [("transport", "pings", "p50 ms", "p99 ms, median", "min..max")]
    for name, runs in result["delays"].items():
        p50, p99 = ([run[key] * 1e3 for run in runs] for key in ("p50", "p99"))
        pings = str(int(sum(run["pings"] for run in runs)))
        spread = f"{min(p99):.1f}..{max(p99):.1f}"
        lines.append((name, pings, f"{median(p50):.1f}", f"{median(p99):.1f}", spread))
    return lines


def idle_table(result: Mapping[str, Any]) -> Table:
    names = ("scheduler", "server", "worker")
    lines: Table = [("transport", *(f"{name}, of a core" for name in names))]
    for transport, spent in result["idle"].items():
        lines.append((transport, *(f"{spent[name]:.2%}" for name in names)))
    return lines


def judge(result: Mapping[str, Any]) -> list[Bar]:
    goodput, delays = result["goodput"], result["delays"]
    pairs = zip(goodput["two planes"], goodput["ib_write_bw"], strict=True)
    share = median(ours / theirs for ours, theirs in pairs)
    one, two = ([run["p99"] for run in delays[name]] for name in ("one plane", "two planes"))
    gain = median(a / b for a, b in zip(one, two, strict=True))
    idle = max(result["idle"]["rdma"].values())
    return [
        Bar(
            what="push_pull with two planes, of ib_write_bw",
            must=f">= {LEAST_SHARE:.2f}",
            value=share,
            ok=share >= LEAST_SHARE,
        ),
        Bar(
            what="p99 of control amid data: one plane over two",
            must=f">= {LEAST_GAIN:.1f}",
            value=gain,
            ok=gain >= LEAST_GAIN,
        ),
        Bar(
            what="busiest idle process, of a core",
            must=f"<= {MOST_IDLE:.2f}",
            value=idle,
            ok=idle <= MOST_IDLE,
        ),
    ]


def bar_table(bars: Sequence[Bar]) -> Table:
    lines: Table = [("threshold", "must be", "is", "")]
    lines += [(b.what, b.must, f"{b.value:.3f}", "ok" if b.ok else "MISS") for b in bars]
    return lines


def titled(result: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """Every table, under what it shows."""
    spec = result["spec"]
    size, runs = show_size(spec["size"]), spec["repetitions"]
    amount = f"{spec['partitions']} partitions of {size}, a window of {show_size(spec['window'])}"
    return [
        (
            f"Both directions, 1 worker and 1 server, {amount}; {runs} runs of each, interleaved",
            goodput_table(result),
        ),
        (
            f"A control message and its answer while 16 values of {size} are in flight",
            delay_table(result),
        ),
        (f"CPU time while nothing is reduced, for {spec['idle_s']:g} s", idle_table(result)),
        ("Thresholds", bar_table(judge(result))),
    ]
