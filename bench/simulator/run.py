#!/usr/bin/env python3
"""Predicts how long a push-pull takes, and a ring all-reduce, on links that need not exist.

Simulates the engine's protocol for 8 to 1,024 workers by default, servers on machines of their own,
as many as workers, and prints for each number of workers the seconds, those over M/B, what the
closed form says, and the ring. docs/design/cost-model.md says what is modelled and how well it
agrees with measurements. --check compares with what bench/pushpull_bench.py --json measured;
--compare-rules shows what limits on the bytes in flight do, and --incast what a switch does whose
ports have little memory.

Exit status: 0 done; 1 --check found a difference above --tolerance, or nothing to compare; 2 bad
usage.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from byteps import cost_model as costmodel

from bench.kit.record import parse_rate, parse_size, show_rate, show_size
from bench.simulator import simulation
from bench.simulator.incast import INCAST_HEAD, RULES_HEAD, compare_incast, compare_rules
from bench.simulator.scenario import (
    LARGEST_PARTITION,
    Scenario,
    Workers,
    engine_partition,
    engine_window,
    payload_fraction,
    uniform,
)
from scripts.progress import aligned

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


CHECK_HEAD = (
    "workers",
    "servers",
    "size",
    "type",
    "backend",
    "measured s",
    "predicted s",
    "off by",
)
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


WORKERS = "8,16,32,64,128,256,512,1024"


def argument[T](parse: Callable[[str], T]) -> Callable[[str], T]:
    """For argparse, which would hide what a ValueError says."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def server_numbers(text: str) -> list[int] | None:
    return None if text == "same" else numbers(text)


def stragglers(text: str) -> tuple[int, float]:
    count, _, seconds = text.partition(":")
    return int(count), float(seconds)


def window(text: str) -> int | None:
    """Bytes; 0 for no limit, None for what ``engine_window`` says."""
    words = {"auto": None, "none": 0}
    return words[text] if text in words else parse_size(text)


def slow(text: str) -> tuple[int, int]:
    count, _, rate = text.partition("@")
    return int(count), parse_rate(rate)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    size, rate = argument(parse_size), argument(parse_rate)
    add("--workers", type=argument(numbers), default=WORKERS, help=f"default: {WORKERS}")
    add(
        "--servers",
        type=argument(server_numbers),
        default="same",
        help="numbers, each combined with each of the workers' (default: same, one per worker)",
    )
    add("--size", type=size, default="1GiB", help="of the tensor (default: 1GiB)")
    add("--link", type=rate, default="25gbit", help="of every host (default: 25gbit)")
    add("--server-link", type=rate, help="of every server (default: --link)")
    add("--core", type=rate, help="what the switch carries in all (default: no limit)")
    add("--mtu", type=int, default=9000, help="bytes, for the headers' part (default: 9000)")
    add("--partition", type=size, help="of the tensor (default: as the engine cuts it)")
    add(
        "--window",
        type=argument(window),
        default="auto",
        help="bytes for each server; auto: the engine's (default); none: no limit",
    )
    add("--credit", type=int, default=0, help="partitions for all servers (default: no limit)")
    add("--credit-delay-us", type=float, default=0.0, help="until either returns (default: 0)")
    add("--socket-buffer", type=size, default=3 << 20, help="of a connection (default: 3MiB)")
    add("--staggered", action="store_true", help="each worker begins at another server")
    add("--colocate", action="store_true", help="servers on the workers' hosts")
    add("--engine-threads", type=int, default=4, help="of a server (default: 4)")
    add("--add-rate", type=float, metavar="GB/S", help="of such a thread (default: no limit)")
    add("--latency-us", type=float, default=0.0, help="of each message (default: 0)")
    add("--stragglers", type=argument(stragglers), metavar="N:SECONDS", help="so many begin late")
    add("--slow-servers", type=argument(slow), metavar="N@RATE", help="so many have this link")
    add("--slow", type=argument(slow), metavar="N@RATE", help="so many workers have this link")
    add("--compare-rules", action="store_true", help="limits on what is in flight, compared")
    add("--incast", action="store_true", help="pushes through a switch with finite ports")
    add("--port", type=size, default="1MiB", help="memory of such a port (default: 1MiB)")
    add("--burst", type=size, default="64KiB", help="that a host sends at once (default: 64KiB)")
    add("--check", type=Path, metavar="FILE", help="compare with this of bench/pushpull_bench.py")
    add("--tolerance", type=float, default=0.05, help="for --check, relative (default: 0.05)")
    options = parser.parse_args(arguments)
    try:
        options.scenarios = scenarios(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def scenarios(options: argparse.Namespace) -> list[Scenario]:
    """One for each number of workers and of servers. Raises ValueError."""
    return [
        scenario(options, workers, servers)
        for workers in options.workers
        for servers in options.servers or [workers]
    ]


def scenario(options: argparse.Namespace, workers: int, servers: int) -> Scenario:
    payload = payload_fraction(options.mtu) / 8
    rate = options.link * payload
    kinds = [Workers(count=workers, rate=rate)]
    if options.stragglers:
        kinds = _split(kinds, options.stragglers[0], start=options.stragglers[1])
    if options.slow:
        kinds = _split(kinds, options.slow[0], rate=options.slow[1] * payload)
    partition = options.partition or engine_partition(options.size, servers)
    window = options.window
    if window is None:
        window = engine_window(partition, servers, rate)
    slow_servers, slow_rate = options.slow_servers or (0, math.inf)
    return Scenario(
        size=options.size,
        workers=tuple(kinds),
        servers=servers,
        server_rate=(options.server_link or options.link) * payload,
        colocated=options.colocate,
        core_rate=options.core * payload if options.core else math.inf,
        partition=partition,
        window=window,
        credit_delay=options.credit_delay_us * 1e-6,
        slow_servers=slow_servers,
        slow_server_rate=slow_rate * payload,
        credit=options.credit,
        socket_buffer=options.socket_buffer,
        staggered=options.staggered,
        add_rate=options.add_rate * 1e9 if options.add_rate else math.inf,
        engine_threads=options.engine_threads,
        latency=options.latency_us * 1e-6,
    )


def _split(kinds: list[Workers], count: int, **change: float) -> list[Workers]:
    """The last kind without so many, and those, changed, before it."""
    *others, last = kinds
    if not 0 < count < last.count:
        raise ValueError(f"{count} of {last.count} workers cannot be different: leave one at least")
    return [
        *others,
        replace(last, count=count, **change),
        replace(last, count=last.count - count),
    ]


def headline(options: argparse.Namespace) -> str:
    link, size = show_rate(options.link), show_size(options.size)
    partition = show_size(options.partition) if options.partition else "as the engine cuts them"
    return f"{size} at {link}, partitions: {partition}"


def limits(options: argparse.Namespace) -> str:
    """What a worker may have in flight."""
    window = "auto" if options.window is None else show_size(options.window)
    parts = [f"window {window}"] if options.window != 0 else []
    parts += [f"credit {options.credit}"] if options.credit else []
    return ", ".join(parts) or "nothing limited"


def check(options: argparse.Namespace) -> int:
    """Measured and predicted, for every figure of a file."""
    try:
        found = compare(options.check, options.scenarios[0])
    except (OSError, ValueError) as error:
        print(f"simulate.py: {error}", file=sys.stderr)
        return 1
    if not found:
        print(
            f"simulate.py: {options.check} has no figures on links of known rate: measure with "
            "--emulate or --link",
            file=sys.stderr,
        )
        return 1
    print(aligned([CHECK_HEAD, *(one.cells() for one in found)]))
    worst = max(abs(one.off_by) for one in found)
    print(f"# largest difference {worst:.1%}; allowed {options.tolerance:.1%}")
    return 1 if worst > options.tolerance else 0


def incast(options: argparse.Namespace) -> int:
    """Pushes through a switch, one table for all numbers of workers."""
    print(
        f"# {headline(options)}, bursts of {show_size(options.burst)}, "
        f"{show_size(options.port)} a port"
    )
    lines = [
        row
        for one in options.scenarios
        for row in compare_incast(
            one,
            burst=options.burst,
            port_bytes=options.port,
            delay=max(options.credit_delay_us, 1.0) * 1e-6,
        )
    ]
    print(aligned([INCAST_HEAD, *lines]))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.check:
        return check(options)
    if options.compare_rules:
        print(f"# {headline(options)}, {options.latency_us:g} us a message")
        lines = [row for one in options.scenarios for row in compare_rules(one, options.link / 8)]
        print(aligned([RULES_HEAD, *lines]))
        return 0
    if options.incast:
        return incast(options)
    rows: list[Row] = [predict(one, options.link / 8) for one in options.scenarios]
    print(f"# {headline(options)}, {limits(options)}, {options.latency_us:g} us a message")
    print(aligned(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
