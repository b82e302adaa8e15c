"""What a soak has seen: samples of processes, what of them is flat; as a picture and a table."""

from __future__ import annotations

import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from trainkit.job import read_record

LONG_LIFE = 0.8
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
    """How one quantity of one process went over the last half of its time."""

    node: str
    life: int
    quantity: str
    span_s: float
    median: float
    growth: float
    """Over the span: the median slope of all pairs of samples, times the span."""
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


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """Of each process over the last half of its life; of workers the long lives only."""
    lives: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for one in samples:
        lives[one.node, one.life].append(one)
    longest: dict[str, float] = defaultdict(float)
    for (node, _), part in lives.items():
        longest[node] = max(longest[node], part[-1].at_s - part[0].at_s)
    found = []
    for (node, life), part in sorted(lives.items()):
        length = part[-1].at_s - part[0].at_s
        if length < LONG_LIFE * longest[node]:
            continue
        half = [one for one in part if one.at_s >= part[-1].at_s - length / 2]
        times = [one.at_s for one in half]
        span = times[-1] - times[0]
        for quantity in QUANTITIES:
            values = [float(getattr(one, quantity)) for one in half]
            median = statistics.median(values)
            memory = quantity == "memory"
            found.append(
                Trend(
                    node=node,
                    life=life,
                    quantity=quantity,
                    span_s=span,
                    median=median,
                    growth=slope(times, values) * span,
                    limit=FLAT_BYTES + FLAT_PART * median if memory else FLAT_COUNT,
                )
            )
    return found


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


# ----- the picture and the table


def draw(samples: Sequence[Sample], events: Sequence[tuple[float, str]], path: Path) -> None:
    """Memory, descriptors and threads of every process over time; dashed where a rank was killed.

    Args:
        samples: in the order of time.
        events: seconds, and ``kill`` or another fault.
        path: ends in ``.svg``, ``.png`` or another form that matplotlib writes.
    """
    # Here, because matplotlib takes a second and a failed run needs none of it.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    titles = ("memory of its own, MiB", "open descriptors", "threads")
    panels = figure.subplots(3, 1, sharex=True)
    nodes = sorted({one.node for one in samples})
    for axes, quantity, title in zip(panels, QUANTITIES, titles, strict=True):
        for number, node in enumerate(nodes):
            own = [one for one in samples if one.node == node]
            scale = 2**20 if quantity == "memory" else 1
            times: list[float] = []
            values: list[float] = []
            for before, one in zip([None, *own], own, strict=False):
                if before is not None and before.life != one.life:
                    times.append(float("nan"))  # a gap between two lives
                    values.append(float("nan"))
                times.append(one.at_s / 60)
                values.append(getattr(one, quantity) / scale)
            axes.plot(times, values, color=f"C{number}", linewidth=1.2, label=node)
        for at_s, what in events:
            if what == "kill":
                axes.axvline(at_s / 60, color="black", linewidth=0.6, dashes=(4, 3))
        if quantity == "memory":
            axes.set_yscale("log")
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
    kills = sum(what == "kill" for _, what in events)
    faults = f"{len(events) - kills} faults of links and servers, {kills} killed ranks"
    panels[0].set_title(f"Training with {faults}")
    panels[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    panels[-1].set_xlabel("minutes; dashed: a rank is killed, and both are started again")
    same = {"Date": None} if path.suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "megatron-byteps"}):
        figure.savefig(path, metadata=same)


def table(found: Sequence[Trend]) -> str:
    lines = [f"{'process':12}{'life':>5}{'quantity':>13}{'median':>12}{'growth':>12}{'limit':>10}"]
    for one in found:
        scale, digits = (2**20, 2) if one.quantity == "memory" else (1, 2)
        unit = " MiB" if one.quantity == "memory" else ""
        lines.append(
            f"{one.node:12}{one.life:5}{one.quantity:>13}"
            f"{one.median / scale:8.{digits}f}{unit:4}{one.growth / scale:+8.{digits}f}{unit:4}"
            f"{one.limit / scale:6.{digits}f}{unit:4}{'' if one.flat else '  GROWS'}"
        )
    return "\n".join(lines)
