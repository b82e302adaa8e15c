"""Predictions as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from byteps import cost_model as costmodel

from benchkit import simulation
from benchkit.scenario import Scenario

SCHEMA = 1
_HEAD = ("workers", "servers", "seconds", "over M/B", "closed form", "ring s", "ring / this")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is predicted for one scenario."""

    workers: int
    servers: int
    seconds: float
    """Of the push-pull."""
    over_limit: float
    """Those seconds over M/B, B being the workers' link with its framing."""
    closed_form: float
    """The same by the cost model."""
    ring_seconds: float
    """Of a ring all-reduce over the same workers and links."""
    ratio: float
    """The ring's seconds over the push-pull's: above 1 where servers win."""


def predict(scenario: Scenario, link: float) -> Row:
    """Simulate both ways; ``link`` is B in bytes per second, what the limit M/B is counted with."""
    seconds = simulation.push_pull(scenario).seconds
    ring_seconds = simulation.ring(scenario)
    limit = scenario.size / link
    if scenario.colocated:
        closed_form = costmodel.colocated(scenario.count, scenario.size, link)
    else:
        closed_form = costmodel.own_machines(scenario.count, scenario.servers, scenario.size, link)
    return Row(
        workers=scenario.count,
        servers=scenario.servers,
        seconds=seconds,
        over_limit=seconds / limit,
        closed_form=closed_form / limit,
        ring_seconds=ring_seconds,
        ratio=ring_seconds / seconds,
    )


def table(rows: Sequence[Row]) -> list[Sequence[str]]:
    """Head and cells."""
    return [_HEAD, *map(_cells, rows)]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.workers),
        str(row.servers),
        f"{row.seconds:.4f}",
        f"{row.over_limit:.3f}",
        f"{row.closed_form:.3f}",
        f"{row.ring_seconds:.4f}",
        f"{row.ratio:.3f}",
    )


def write_json(path: Path, rows: Sequence[Row], settings: dict[str, Any]) -> None:
    """All rows at full precision, with what they were predicted for."""
    whole = {"schema": SCHEMA, "settings": settings, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Time over M/B against the number of workers, servers and ring."""
    # Here, because matplotlib takes a second and only --plot needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    workers = [row.workers for row in rows]
    axes.plot(workers, [row.over_limit for row in rows], marker="o", label="push-pull")
    ring = [row.over_limit * row.ratio for row in rows]
    axes.plot(workers, ring, marker="s", label="ring")
    axes.plot(workers, [row.closed_form for row in rows], "k--", label="push-pull, closed form")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("workers")
    axes.set_ylabel("time over M/B")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
