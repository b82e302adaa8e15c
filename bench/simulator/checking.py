"""Holds what was measured, as bench/pushpull_bench.py --json writes it, against the simulation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.kit.units import show_size
from bench.simulator import simulation
from bench.simulator.scenario import (
    LARGEST_PARTITION,
    Scenario,
    engine_partition,
    engine_window,
    payload_fraction,
    uniform,
)

HEAD = ("workers", "servers", "size", "type", "backend", "measured s", "predicted s", "off by")
_SMALLEST = "BYTEPS_MIN_PARTITION_BYTES="
_LARGEST = "BYTEPS_PARTITION_BYTES="
_WINDOW = "BYTEPS_SERVER_WINDOW_BYTES="


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of the benchmark, and its prediction."""

    workers: int
    servers: int
    size: int
    dtype: str
    backend: str
    measured: float
    """Seconds: the median."""
    predicted: float

    @property
    def off_by(self) -> float:
        """Measured over predicted, less 1: above 0 where the program is slower than the model."""
        return self.measured / self.predicted - 1

    def cells(self) -> Sequence[str]:
        return (
            str(self.workers),
            str(self.servers),
            show_size(self.size),
            self.dtype,
            self.backend,
            f"{self.measured:.4f}",
            f"{self.predicted:.4f}",
            f"{self.off_by:+.1%}",
        )


def compare(path: Path, model: Scenario) -> list[Comparison]:
    """Every figure of a file whose links have a known rate; the others cannot be predicted.

    Workers, servers, links, sizes and the engine's settings are those of the file; what it does not
    say (additions, latency) is taken from ``model``.

    Raises:
        ValueError: the file is not what the benchmark writes.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    try:
        settings = content["meta"].get("settings", "")
        return [one for run in content["runs"] for one in _run(run, settings, model)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not what pushpull_bench.py --json writes: {error!r}"
        ) from error


def _run(run: dict[str, Any], settings: str, model: Scenario) -> Iterator[Comparison]:
    topology = run["plan"]["topology"]
    if not topology["link_bits"]:
        return
    rate = topology["link_bits"] / 8 * payload_fraction(topology["mtu"])
    for row in run["rows"]:
        if row["backend"] == "sockets":
            continue  # nobody waits for the sums that the simulation waits for
        case = row["case"]
        links = uniform(topology["workers"], topology["servers"], case["size"], rate)
        # Tensors that are summed together follow each other as parts of one do.
        partition = engine_partition(
            case["size"] // case.get("tensors", 1),
            topology["servers"],
            _setting(settings, _SMALLEST, 0),
            _setting(settings, _LARGEST, LARGEST_PARTITION),
            link=topology["link_bits"] / 8,
        )
        window = _setting(settings, _WINDOW, 0)
        scenario = replace(
            model,
            size=links.size,
            workers=links.workers,
            servers=links.servers,
            server_rate=rate,
            colocated=topology["colocate"],
            partition=partition,
            window=window or engine_window(partition, topology["servers"], rate),
        )
        through_servers = row["backend"] == "byteps"
        push_pull = simulation.push_pull(scenario).seconds if through_servers else None
        yield Comparison(
            workers=topology["workers"],
            servers=topology["servers"] if through_servers else 0,
            size=case["size"],
            dtype=case["dtype"],
            backend=row["backend"],
            measured=row["p50_s"],
            predicted=simulation.ring(scenario) if push_pull is None else push_pull,
        )


def _setting(settings: str, name: str, fallback: int) -> int:
    for word in settings.split():
        if word.startswith(name):
            return int(word.removeprefix(name))
    return fallback
