"""Samples of the processes of a soak, and which figures stay flat, as a table."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.trainkit.job import read_record

LONG_LIFE = 0.5
"""A life is long that lasts this part of the longest."""

FLAT_BYTES, FLAT_PART = 1 << 20, 0.01
"""Memory is flat that grows by less than so many bytes and this part of its median."""
FLAT_COUNT = 1.0
"""Descriptors and threads are flat that grow by less."""
MOST_POINTS = 400
"""A trend is made of no more: it looks at all pairs."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a process has at one moment."""

    at_s: float
    """Since the soak began."""
    node: str
    """``scheduler``, ``server 0``, ``worker 1``, ..."""
    life: int
    """How often it was started before."""
    memory: int
    """Bytes of its own: resident, without what it has mapped of files."""
    descriptors: int
    threads: int


QUANTITIES = ("memory", "descriptors", "threads")


@dataclass(frozen=True, kw_only=True)
class Trend:
    """How one quantity of one process, or of the ranks together, went."""

    node: str
    """``scheduler``, ``server 0``, or ``ranks``: the mean of all."""
    when: str
    """Within the last half of a long life of the ranks, or from the first of these to the last."""
    quantity: str
    median: float
    growth: float
    """Within a life: the median slope of all pairs of samples, times the span."""
    limit: float

    @property
    def flat(self) -> bool:
        return self.growth < self.limit


# ----- what was sampled


def sample(pid: int, node: str, life: int, at_s: float) -> Sample | None:
    """None when the process has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        lines = (folder / "status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        descriptors = len(os.listdir(folder / "fd"))
    except OSError:
        return None
    if "RssAnon" not in fields:
        return None  # it has ended, and nobody has asked for its status
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
    """The median slope of all pairs (Theil and Sen): a short peak does not change it.

    Of many points some are taken, evenly. 0 for fewer than two.
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
    """The ranks' lives that lasted, each with its last half: seconds since the soak began."""
    times: dict[int, list[float]] = defaultdict(list)
    for one in samples:
        if one.node.startswith("worker"):
            times[one.life].append(one.at_s)
    lengths = {life: max(at) - min(at) for life, at in times.items()}
    longest = max(lengths.values(), default=0.0)
    return [
        (life, max(at) - lengths[life] / 2, max(at))
        for life, at in sorted(times.items())
        if lengths[life] >= LONG_LIFE * longest
    ]


def _series(part: Sequence[Sample], quantity: str) -> dict[str, tuple[list[float], list[float]]]:
    """Times and values of each process; of the ranks the mean.

    They run the same program: what one's allocator keeps for a while differs, a leak is in both.
    """
    values: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in part:
        node = "ranks" if one.node.startswith("worker") else one.node
        values[node][one.at_s].append(float(getattr(one, quantity)))
    ranks = len({one.node for one in part if one.node.startswith("worker")})
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
    """Within the last half of each long life, and of what outlives the ranks, between these.

    A server's memory goes back to the kernel between two lives, and comes again in the first
    minutes of the next: so a line through several lives would say nothing.
    """
    found = []
    halves = _long_lives(samples)
    for quantity in QUANTITIES:
        medians: dict[str, list[float]] = defaultdict(list)
        for life, begin, end in halves:
            part = [one for one in samples if begin <= one.at_s <= end]
            for node, (times, values) in sorted(_series(part, quantity).items()):
                medians[node].append(statistics.median(values))
                growth = slope(times, values) * (times[-1] - times[0])
                found.append(_trend(node, f"life {life}", quantity, medians[node][-1], growth))
        for node, levels in sorted(medians.items()):
            if node == "ranks" or len(levels) < 2:
                continue
            when = f"lives {halves[0][0]} to {halves[-1][0]}"
            growth = levels[-1] - levels[0]
            found.append(_trend(node, when, quantity, statistics.median(levels), growth))
    return sorted(found, key=lambda one: (one.node, one.when))


def _trend(node: str, when: str, quantity: str, median: float, growth: float) -> Trend:
    limit = FLAT_BYTES + FLAT_PART * median if quantity == "memory" else FLAT_COUNT
    return Trend(node=node, when=when, quantity=quantity, median=median, growth=growth, limit=limit)


def replayed(records: Sequence[Path]) -> tuple[int, int, list[str]]:
    """Steps done, how many of them more than once, and what differed between the lives."""
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


def table(found: Sequence[Trend]) -> str:
    lines = [f"{'process':11}{'when':>13}{'quantity':>13}{'median':>12}{'growth':>12}{'limit':>10}"]
    for one in found:
        scale, unit = (2**20, " MiB") if one.quantity == "memory" else (1, "")
        lines.append(
            f"{one.node:11}{one.when:>13}{one.quantity:>13}"
            f"{one.median / scale:8.2f}{unit:4}{one.growth / scale:+8.2f}{unit:4}"
            f"{one.limit / scale:6.2f}{unit:4}{'' if one.flat else '  GROWS'}"
        )
    return "\n".join(lines)
