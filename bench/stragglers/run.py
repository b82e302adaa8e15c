#!/usr/bin/env python3
"""Measures how much of a straggler's delay a step shows, through BytePS and through gloo's ring.

Ranks on emulated links compute, which here is sleeping, and start a sum of each bucket as soon as
their backward pass has it. All ranks compute as long; one starts late; one computes longer; or all
have sequences of different lengths. A step with a delay is compared with the balanced one of the
same number; both backends alternate in the same processes, and every sum is compared with a closed
form. In brackets: what the links allow at best.

  bench/stragglers/run.py                            four workers and servers at 100 Mbit/s
  bench/stragglers/run.py --servers 2 --shards       fewer servers; each rank takes its share alone

docs/results/integrations.md says what the columns mean, and holds the table. Needs root.

Exit status: 0 all sums are right; 1 one is not, or a process failed; 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.kit import record
from bench.kit.emulation import Emulation, EmulationError
from bench.kit.plan import Topology
from bench.kit.processes import LaunchError, Placement, Processes, become_interruptible, run_job
from bench.kit.record import parse_rate, parse_size, show_rate, show_size
from bench.simulator.scenario import payload_fraction
from bench.stragglers.rank import KINDS, WAYS, Experiment, Links, Step, delay, least_seconds, loads
from scripts.progress import Progress, aligned, pipes

SCHEMA = 1
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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=int, default=4, help="default: 4")
    add("--servers", type=int, default=4, help="on hosts of their own (default: 4)")
    add("--link", default="100mbit", metavar="RATE", help="of each host (default: 100mbit)")
    add("--size", default="8MiB", help="fp32 that a rank has summed in a step (default: 8MiB)")
    add("--buckets", type=int, default=8, help="of a step (default: 8)")
    add(
        "--computing",
        type=float,
        nargs="+",
        default=[0.5, 1.0, 2.0],
        metavar="TIMES",
        help="what a balanced rank computes, in times of --size on a link (default: 0.5 1 2)",
    )
    add("--steps", type=int, default=10, help="of each kind (default: 10)")
    add("--shards", action="store_true", help="each rank takes its share of the sums only")
    add("--seed", type=int, default=1, help="of the sequences' lengths (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write every step")
    add("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(arguments)
    try:
        _check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _check(options: argparse.Namespace) -> None:
    options.link, options.size = parse_rate(options.link), parse_size(options.size)
    if options.workers < 2 or options.servers < 1:
        raise ValueError("there must be two --workers and one of --servers at least")
    if options.buckets < 1 or options.steps < 1 or min(options.computing) <= 0:
        raise ValueError("--buckets, --steps and --computing must be above 0")
    if len(set(options.computing)) < len(options.computing):
        raise ValueError("name each of --computing once")
    if options.size % (4 * options.buckets * options.workers):
        raise ValueError(
            f"{show_size(options.size)} cannot be cut into {options.buckets} buckets of fp32, of "
            f"which each of {options.workers} ranks has an equal share: choose another --size"
        )


def measure(topology: Topology, experiment: Experiment, timeout_s: float) -> list[Step]:
    """Run all steps on emulated hosts.

    Raises:
        LaunchError: a process failed or was late.
        EmulationError: the hosts could not be made.
    """
    with (
        Emulation(topology) as emulation,
        tempfile.TemporaryDirectory(prefix="rl-stragglers-") as folder,
        Processes(Path(folder)) as processes,
    ):
        placement = Placement(topology, emulation.hosts)
        spec = {"experiment": asdict(experiment)}
        found = run_job("bench.stragglers.rank", spec, placement, processes, {}, timeout_s)
        return [Step(**entry) for entry in found]


def header(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, str]:
    """What the figures depend on."""
    what = "its share" if options.shards else "all"
    return {
        "command": " ".join([Path(sys.argv[0]).name, *arguments]),
        "hardware": record.hardware(),
        "topology": f"{options.workers} workers, {options.servers} servers on hosts of their own, "
        f"links of {show_rate(options.link)} each way",
        "step": f"{show_size(options.size)} of fp32 in {options.buckets} buckets, of whose sums a "
        f"rank takes {what}",
        "samples": f"{options.steps} steps of each line, interleaved; medians",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    rate = options.link / 8 * payload_fraction(9000)
    links = Links(
        workers=options.workers, servers=options.servers, rate=rate, shards=options.shards
    )
    topology = Topology(
        workers=options.workers,
        servers=options.servers,
        emulated_hosts=options.workers + options.servers,
        link_bits=options.link,
    )
    experiment = Experiment(
        workers=options.workers,
        size=options.size,
        buckets=options.buckets,
        computing=[times * options.size / rate for times in options.computing],
        steps=options.steps,
        shards=options.shards,
        seed=options.seed,
    )
    every = [
        least_seconds(
            way, links, options.size, options.buckets, loads(kind, options.workers, computing, 0)
        )
        for computing in experiment.computing
        for kind in KINDS
        for way in WAYS
    ]
    seconds = sum(every) * (options.steps + 1)
    try:
        with Progress("stragglers") as shown:
            shown.update(f"{len(every) * (options.steps + 1)} steps, {seconds:.0f} s at best")
            steps = measure(topology, experiment, 300 + 4 * seconds)
    except (LaunchError, EmulationError) as error:
        print(f"bench/stragglers/run.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was started has been ended", file=sys.stderr)
        return 130
    meta = header(options, sys.argv[1:] if arguments is None else arguments)
    lines = table(rows(experiment, links, steps))
    print("\n".join(f"# {name}: {text}" for name, text in meta.items()))
    print("\n".join(pipes(lines)) if options.markdown else aligned(lines))
    wrong = sum(step.wrong for step in steps)
    print(f"# wrong elements: {wrong}")
    if options.json:
        whole = {"schema": SCHEMA, "meta": meta, "steps": [asdict(step) for step in steps]}
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
