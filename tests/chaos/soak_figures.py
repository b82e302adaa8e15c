"""Samples of a soak's processes, and a table of the quantities that stay flat."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.trainkit.job import read_record

LONG_LIFE = 0.5
"""A generation counts as long from this fraction of the longest one."""

FLAT_BYTES, FLAT_PART = 1 << 20, 0.01
"""Largest growth of memory that still counts as flat: in bytes, and as a part of the median."""
FLAT_COUNT = 1.0
"""Largest growth of descriptors and threads that still counts as flat."""
MOST_POINTS = 400
"""Largest number of points of a trend. It is limited because a trend looks at all pairs of
points."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Resources of a process at a moment."""

    at_s: float
    """Seconds since the soak began."""
    node: str
    """``scheduler``, ``server 0``, ``worker 1``, ..."""
    life: int
    """Number of earlier starts."""
    memory: int
    """Resident bytes of the process's own memory, without mapped files."""
    descriptors: int
    threads: int


QUANTITIES = ("memory", "descriptors", "threads")


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Growth of a quantity of a process, or of all ranks together."""

    node: str
    """``scheduler``, ``server 0``, or ``ranks`` for the mean of all ranks."""
    when: str
    """Period of the growth: the last half of a long generation of the ranks, or the time from the
    first long generation to the last."""
    quantity: str
    median: float
    growth: float
    """Growth. Within a generation it is the median slope of all pairs of samples, times the time
    span."""
    limit: float

    @property
    def flat(self) -> bool:
        return self.growth < self.limit


# ----- samples


def sample(pid: int, node: str, life: int, at_s: float) -> Sample | None:
    """Sample a process; None when it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        lines = (folder / "status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        descriptors = len(os.listdir(folder / "fd"))
    except OSError:
        return None
    if "RssAnon" not in fields:
        return None  # the process has ended, and nobody has read its status
    kilobytes = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return Sample(
        at_s=round(at_s, 2),
        node=node,
        life=life,
        memory=kilobytes << 10,
        descriptors=descriptors,
        threads=int(fields["Threads"]),
    )


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Compute the median slope of all pairs of points (the Theil-Sen estimator), which short peaks
    do not change.

    A large set of points is thinned evenly. 0 for fewer than two points.
    """
    step = max(1, -(-len(times) // MOST_POINTS))
    points = list(zip(times, values, strict=True))[::step]
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for i, earlier in enumerate(points)
        for later in points[i + 1 :]
        if later[0] > earlier[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def _long_lives(samples: Sequence[Sample]) -> list[tuple[int, float, float]]:
    """Return the ranks' long generations with their last halves, in seconds since the soak
    began."""
    times: dict[int, list[float]] = defaultdict(list)
    for taken in samples:
        if taken.node.startswith("worker"):
            times[taken.life].append(taken.at_s)
    lengths = {life: max(at) - min(at) for life, at in times.items()}
    longest = max(lengths.values(), default=0.0)
    return [
        (life, max(at) - lengths[life] / 2, max(at))
        for life, at in sorted(times.items())
        if lengths[life] >= LONG_LIFE * longest
    ]


def _series(part: Sequence[Sample], quantity: str) -> dict[str, tuple[list[float], list[float]]]:
    """Get times and values of each process; for ranks the mean.

    Ranks run the same program: temporary differences come from allocators, but a leak is in all of
    them.
    """
    values: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for taken in part:
        node = "ranks" if taken.node.startswith("worker") else taken.node
        values[node][taken.at_s].append(float(getattr(taken, quantity)))
    ranks = len({taken.node for taken in part if taken.node.startswith("worker")})
    return {
        node: (
            [at_s for at_s, several in at.items() if node != "ranks" or len(several) == ranks],
            [
                statistics.mean(several)
                for several in at.values()
                if node != "ranks" or len(several) == ranks
            ],
        )
        for node, at in values.items()
    }


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """Compute trends within the last half of each long generation and, for processes that outlive
    the ranks, between long generations.

    A server's memory returns to the kernel between two generations and grows again in the first
    minutes of the next one, so a line through several generations would mean nothing.
    """
    trends_of = []
    halves = _long_lives(samples)
    for quantity in QUANTITIES:
        medians: dict[str, list[float]] = defaultdict(list)
        for life, begin, end in halves:
            part = [taken for taken in samples if begin <= taken.at_s <= end]
            for node, (times, values) in sorted(_series(part, quantity).items()):
                medians[node].append(statistics.median(values))
                growth = slope(times, values) * (times[-1] - times[0])
                trends_of.append(_trend(node, f"life {life}", quantity, medians[node][-1], growth))
        for node, levels in sorted(medians.items()):
            if node == "ranks" or len(levels) < 2:
                continue
            when = f"lives {halves[0][0]} to {halves[-1][0]}"
            growth = levels[-1] - levels[0]
            trends_of.append(_trend(node, when, quantity, statistics.median(levels), growth))
    return sorted(trends_of, key=lambda trend: (trend.node, trend.when))


def _trend(node: str, when: str, quantity: str, median: float, growth: float) -> Trend:
    limit = FLAT_BYTES + FLAT_PART * median if quantity == "memory" else FLAT_COUNT
    return Trend(node=node, when=when, quantity=quantity, median=median, growth=growth, limit=limit)


def replayed(records: Sequence[Path]) -> tuple[int, int, list[str]]:
    """Count steps and repeated steps; list differences of repeated steps between generations."""
    losses: dict[int, float] = {}
    again, wrong = 0, []
    for record in records:
        for step in read_record(record).steps:
            if step.iteration not in losses:
                losses[step.iteration] = step.loss
                continue
            again += 1
            before = losses[step.iteration]
            if before != step.loss:
                wrong.append(
                    f"step {step.iteration} gave the loss {before!r}, and {step.loss!r} in "
                    f"{record.stem}"
                )
    return len(losses), again, wrong


def table(all_trends: Sequence[Trend]) -> str:
    lines = [f"{'process':11}{'when':>13}{'quantity':>13}{'median':>12}{'growth':>12}{'limit':>10}"]
    for trend in all_trends:
        scale, unit = (2**20, " MiB") if trend.quantity == "memory" else (1, "")
        lines.append(
            f"{trend.node:11}{trend.when:>13}{trend.quantity:>13}"
            f"{trend.median / scale:8.2f}{unit:4}{trend.growth / scale:+8.2f}{unit:4}"
            f"{trend.limit / scale:6.2f}{unit:4}{'' if trend.flat else '  GROWS'}"
        )
    return "\n".join(lines)
