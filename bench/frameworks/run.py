#!/usr/bin/env python3
"""Times training steps of DDP and FSDP2 through BytePS, and by gloo or NCCL alone.

Every rank trains a model of linear layers in several ways, interleaved step by step: DDP and HSDP
(FSDP2 over a mesh) with gloo or NCCL, both with the BytePS backend, and DDP with the communication
hook. At the end the parameters of equivalent ways are compared.

  bench/frameworks/run.py                               4 + 4 hosts at 100 Mbit/s, fp32
  bench/frameworks/run.py --wire-dtype bf16 --ways ddp,ddp-backend,ddp-hook
  bench/frameworks/run.py --device cuda --link 10gbit --width 4096 --layers 6
  bench/frameworks/run.py --device cuda --link none --workers 2 --servers 2 --ways hsdp,hsdp-backend
  bench/frameworks/run.py --colocate --link 200mbit \
      --ways fsdp,fsdp-fp8,fsdp-bf16,fsdp-int8,fsdp-int8-gathers    next to the links' own ratios

Needs root. Exit status: 0 all thresholds are reached; 1 a threshold was missed, parameters differ,
or a process failed; 2 bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.frameworks.rank import SHARDED, WAYS, Experiment
from bench.kit.emulation import LOOPBACK, Emulation, EmulationError, Host
from bench.kit.plan import FP8_BITS, WIRE_BITS, Topology
from bench.kit.processes import LaunchError, Placement, Processes, become_interruptible, run_job
from bench.kit.record import metadata, parse_rate, topology_text
from scripts.children import outnumbered
from scripts.progress import Progress, aligned, pipes, put_between

SCHEMA = 1
HEAD = ("way", "ms per step", "min..max", "speed over native", "min..max")
OF_LINKS = ("links' ratio", "fraction of it")
BEGIN = "<!-- made by bench/frameworks/run.py --markdown, wire type {wire} -->"
SAME = 1e-4
"""Allowed relative difference of trained parameters, because additions may happen in different
orders."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=int, default=4, help="hosts of one rank each (default: 4)")
    add("--servers", type=int, default=4, help="on hosts of their own (default: 4)")
    add("--colocate", action="store_true", help="servers are on the workers' hosts")
    add("--ranks-per-host", type=int, default=1, help="default: 1")
    add(
        "--link",
        default="100mbit",
        metavar="RATE",
        help="of each host (default: 100mbit); none: all run on this machine as it is",
    )
    add("--layers", type=int, default=4, help="default: 4")
    add("--width", type=int, default=1024, help="of a layer of width x width (default: 1024)")
    add("--batch", type=int, default=4, help="rows per rank and step (default: 4)")
    add("--steps", type=int, default=8, help="timed, of each way and launch (default: 8)")
    add("--launches", type=int, default=3, help="default: 3")
    add("--ways", default=",".join(WAYS), help=f"default: {','.join(WAYS)}")
    add("--wire-dtype", default="same", choices=("same", "bf16", "fp16"), help="default: same")
    add("--reduce-dtype", choices=("bf16",), help="in which HSDP reduces gradients (default: fp32)")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    add("--at-least", type=float, metavar="X", help="fail where a way has less speed over native")
    add(
        "--profile",
        type=Path,
        metavar="FILE",
        help="torch.profiler's trace of one more step, of the last way and rank 0",
    )
    add("--json", type=Path, metavar="FILE", help="write every step")
    add("--markdown", type=Path, metavar="PAGE", help="rewrite the table of this wire type there")
    options = parser.parse_args(arguments)
    try:
        options.link = 0 if options.link == "none" else parse_rate(options.link)
        options.ways = tuple(options.ways.split(","))
        known = (*WAYS, *SHARDED)
        if unknown := set(options.ways) - set(known):
            raise ValueError(f"--ways: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
        if min(options.workers, options.servers, options.steps, options.launches) < 1:
            raise ValueError("--workers, --servers, --steps and --launches must be at least 1")
    except ValueError as error:
        parser.error(str(error))
    return options


def launch(options: argparse.Namespace, topology: Topology, timeout_s: float) -> dict[str, Any]:
    """Launch all ways once.

    Raises:
        LaunchError: a process failed or timed out.
        EmulationError: the emulated hosts could not be created.
    """
    experiment = Experiment(
        ways=options.ways,
        layers=options.layers,
        width=options.width,
        batch=options.batch,
        steps=options.steps,
        shards=options.ranks_per_host,
        reduce_dtype=options.reduce_dtype,
        device=options.device,
        profile=str(options.profile.resolve()) if options.profile else None,
    )
    with (
        _hosts(topology) as hosts,
        tempfile.TemporaryDirectory(prefix="frameworks-") as folder,
        Processes(Path(folder)) as processes,
    ):
        shared = options.device == "cuda" and outnumbered(topology.workers)
        placement = Placement(topology, hosts, shares_gpus=shared)
        ours = {
            "BYTEPS_C10D_WIRE_DTYPE": options.wire_dtype,
            "BYTEPS_START_TIMEOUT_S": "200",
        }
        if options.link:
            ours["BYTEPS_LINK_GBPS"] = f"{options.link / 1e9:g}"
        # Without emulated links NVLink would beat servers, and bf16 would be as short as NCCL's
        # values.
        if not options.link or set(options.ways) & set(SHARDED):
            ours["BYTEPS_C10D_BACKEND"] = "flat"
        spec = {"experiment": asdict(experiment)}
        program = "bench.frameworks.rank"
        return dict(run_job(program, spec, placement, processes, ours, timeout_s))


@contextlib.contextmanager
def _hosts(topology: Topology) -> Iterator[Sequence[Host]]:
    if topology.emulated_hosts == 0:
        yield [LOOPBACK]
        return
    with Emulation(topology) as emulation:
        yield emulation.hosts


def native(way: str) -> str:
    """Return the way without BytePS with which a way is compared."""
    return way.partition("-")[0]


def links_ratio(way: str, device: str) -> float:
    """Return the ratio of bytes that a step sends over each NIC: those of plain FSDP2 in bf16,
    divided by those of this way. A step gathers the parameters twice, and reduce-scatters the
    gradients (in this way to servers on the shards' hosts).

    NCCL's reduce-scatter sends each value once. gloo's is an all-reduce, which sends it twice.
    """
    bits = {**WIRE_BITS, "fp8": FP8_BITS}
    gradients, parameters = (bits.get(name, 16.0) for name in SHARDED[way])
    native = 2 * 16 + (1 if device == "cuda" else 2) * 16
    return native / (2 * parameters + gradients)


def rows(
    launches: Sequence[Mapping[str, Any]], ways: Sequence[str], device: str = "cpu"
) -> list[Sequence[str]]:
    """Return the table: the median of each launch, and the median of these medians."""
    medians = {
        way: [statistics.median(launch["steps"][way]) for launch in launches] for way in ways
    }
    table: list[Sequence[str]] = []
    for way in ways:
        own, theirs = medians[way], medians.get(native(way))
        cells = [way, f"{statistics.median(own):.1f}", f"{min(own):.1f}..{max(own):.1f}"]
        if theirs is None or way == native(way):
            table.append([*cells, "", ""])
            continue
        ratios = sorted(their / my for my, their in zip(own, theirs, strict=True))
        spread = f"{ratios[0]:.2f}..{ratios[-1]:.2f}"
        table.append([*cells, f"{statistics.median(ratios):.2f}", spread])
    if not set(ways) & set(SHARDED):
        return table
    return [[*row, *_of_links(row, device)] for row in table]


def _of_links(row: Sequence[str], device: str) -> Sequence[str]:
    if row[0] not in SHARDED or not row[3]:
        return ["", ""]
    ratio = links_ratio(row[0], device)
    return [f"{ratio:.2f}", f"{float(row[3]) / ratio:.2f}"]


def problems(
    launches: Sequence[Mapping[str, Any]], ways: Sequence[str], at_least: float | None, wire: str
) -> list[str]:
    """Return descriptions of missed thresholds and differing parameters."""
    wrong = []
    for launch in launches:
        for way in ways:
            own, theirs = launch["sums"][way], launch["sums"].get(native(way), launch["sums"][way])
            if (
                wire == "same"
                and way not in SHARDED
                and abs(own - theirs) > SAME * max(1.0, abs(theirs))
            ):
                wrong.append(f"{way} learned {own:.6f}, {native(way)} {theirs:.6f}")
    if at_least is not None:
        for row in rows(launches, ways):
            if row[3] and float(row[3]) < at_least:
                wrong.append(f"{row[0]}: {row[3]} is less than {at_least:g}")
    return wrong


def rewrite(page: Path, wire: str, meta: Mapping[str, str], table: Sequence[Sequence[str]]) -> None:
    """Write the table into the page, between the marks of its wire type.

    Raises:
        ValueError: the page has no such marks.
    """
    shown = {name: meta[name] for name in ("date", "command", "hardware", "load")}
    shown["command"] = re.sub(r" --(json|markdown) \S+", "", shown["command"])
    metadata = "; ".join(f"{name}: {text}" for name, text in shown.items())
    text = "\n".join(["", metadata, "", *pipes(table), ""])
    put_between(page, BEGIN.format(wire=wire), "<!-- end -->", text)


def _emulated(options: argparse.Namespace) -> int:
    return int(options.workers + (0 if options.colocate else options.servers))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    topology = Topology(
        workers=options.workers * options.ranks_per_host,
        servers=options.servers,
        ranks_per_host=options.ranks_per_host,
        colocate=options.colocate,
        emulated_hosts=_emulated(options) if options.link else 0,
        link_bits=options.link,
    )
    launches = []
    try:
        with Progress("frameworks") as shown:
            for number in range(options.launches):
                shown.update(f"launch {number + 1} of {options.launches}")
                launches.append(launch(options, topology, 900))
    except (LaunchError, EmulationError) as error:
        print(f"bench/frameworks/run.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was started has been ended", file=sys.stderr)
        return 130
    given = sys.argv[1:] if arguments is None else arguments
    size = options.layers * options.width**2 * 4 / 2**20
    meta = {
        **metadata(given),
        "load": f"{os.getloadavg()[2]:.1f} in the last 15 minutes, of all processes",
        "topology": topology_text(topology),
        "model": f"{options.layers} layers of {options.width} x {options.width}: {size:.0f} MiB of "
        f"fp32 gradients, sent as {options.wire_dtype}",
    }
    head = (*HEAD, *OF_LINKS) if set(options.ways) & set(SHARDED) else HEAD
    table = [head, *rows(launches, options.ways, options.device)]
    print("\n".join(f"# {name}: {text}" for name, text in meta.items()))
    print(aligned(table))
    if options.json:
        whole = {"schema": SCHEMA, "meta": meta, "launches": launches}
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        rewrite(options.markdown, options.wire_dtype, meta, table)
    wrong = problems(launches, options.ways, options.at_least, options.wire_dtype)
    print("\n".join(wrong) or "# what was learned is the same, and all thresholds are reached")
    return 1 if wrong else 0


if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
