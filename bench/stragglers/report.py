"""How much of a straggler's delay the steps show, and what the links allow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.stragglers.delays import KINDS, WAYS, Links, delay, least_seconds, loads
from bench.stragglers.rank import Experiment, Step

HEAD = ("computing", "ranks", "delay ms", "BytePS ms", "seen of it", "gloo ms", "seen of it")
"""Of ``WAYS``: BytePS's servers, then gloo's ring. In brackets: what the links allow."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, kind and way, over all steps. Medians, where not said otherwise."""

    computing: float
    """Seconds of a balanced rank, over those of a tensor on a link."""
    kind: str
    way: str
    seconds: float
    least: float
    """Seconds that the links allow."""
    delay: float
    """Seconds by which the last rank computes longer than a balanced one; 0 if balanced."""
    seen: float | None
    """Part of the delay by which the step is longer than the balanced one of the same number."""
    least_seen: float | None
    """The part that ``least`` alone would show."""

    def cells(self) -> tuple[str, str]:
        """The step's time, and how much of the delay it shows."""
        seen = "-" if self.seen is None else f"{self.seen:.2f} ({self.least_seen:.2f})"
        return f"{1e3 * self.seconds:.0f} ({1e3 * self.least:.0f})", seen


def table(found: Sequence[Row]) -> list[tuple[str, ...]]:
    """HEAD, and a line for each case and kind, both ways side by side."""
    lines: list[tuple[str, ...]] = [HEAD]
    for servers, ring in zip(found[::2], found[1::2], strict=True):
        late = f"{1e3 * servers.delay:.0f}" if servers.delay else "-"
        case = (f"{servers.computing:g}", servers.kind, late)
        lines.append((*case, *servers.cells(), *ring.cells()))
    return lines


def rows(experiment: Experiment, links: Links, steps: Sequence[Step]) -> list[Row]:
    """A row for each case, kind and way, in this order."""
    took = {(one.computing, one.kind, one.way, one.number): one.seconds for one in steps}
    whole = experiment.size / links.rate
    return [
        _row(
            experiment,
            links,
            computing,
            kind,
            way,
            [took[computing, kind, way, number] for number in range(experiment.steps)],
            [took[computing, "balanced", way, number] for number in range(experiment.steps)],
            whole,
        )
        for computing in experiment.computing
        for kind in KINDS
        for way in WAYS
    ]


def _row(
    experiment: Experiment,
    links: Links,
    computing: float,
    kind: str,
    way: str,
    took: Sequence[float],
    balanced: Sequence[float],
    whole: float,
) -> Row:
    def least(one: str, number: int) -> float:
        every = loads(one, experiment.workers, computing, number, seed=experiment.seed)
        return least_seconds(way, links, experiment.size, experiment.buckets, every)

    def lateness(number: int) -> float:
        every = loads(kind, experiment.workers, computing, number, seed=experiment.seed)
        even = loads("balanced", experiment.workers, computing, number, seed=experiment.seed)
        return delay(every, even)

    numbers = range(experiment.steps)
    delays = [lateness(number) for number in numbers]
    seen = least_seen = None
    if kind != "balanced":
        seen = [(took[i] - balanced[i]) / delays[i] for i in numbers]
        least_seen = [(least(kind, i) - least("balanced", i)) / delays[i] for i in numbers]
    return Row(
        computing=computing / whole,
        kind=kind,
        way=way,
        seconds=statistics.median(took),
        least=statistics.median(least(kind, number) for number in numbers),
        delay=statistics.median(delays),
        seen=statistics.median(seen) if seen else None,
        least_seen=statistics.median(least_seen) if least_seen else None,
    )
