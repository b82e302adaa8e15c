"""Predictions as a table, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from byteps import cost_model as costmodel

from bench.simulator import simulation
from bench.simulator.scenario import Scenario

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
