#!/usr/bin/env python3
"""Times whole training steps of Megatron with gradients summed by BytePS or torch.distributed.

Trains the GPT of scripts/train.py with several backends, interleaved, --launches times each: BytePS
with servers, and gloo (NCCL on GPUs), with all-reduce or with the optimizer sharded over all ranks
or inside each host. All processes run on this machine's loopback or, with --emulate, in network
namespaces with --nics-per-host rate-limited links each, --ranks-per-host of them in each. BytePS,
gloo and NCCL use all of these links. The figure of a launch is the median of its steps after
--warmup; that of a backend is the median over launches. The first backend is compared with each
other backend. The losses of all launches must agree: bit for bit with two workers, where BytePS and
all-reduce each make a single addition.

  bench/train_bench.py                                             two workers on loopback
  bench/train_bench.py --workers 4 --servers 4 --emulate 8@500mbit -- --hidden-size 256
  bench/train_bench.py --workers 8 --ranks-per-host 2 --servers 4 --emulate 8@10gbit \
      --ways byteps-by-host-bf16,by-host-bf16,sharded-bf16,sharded -- --bf16 --overlap-grad-reduce

Exit status: 0 success; 1 losses differ, --min-ratio was missed, or a process failed; 2 bad usage.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

from bench.kit.emulation import EmulationError, Host, hosts_of
from bench.kit.plan import Plan, Topology
from bench.kit.processes import (
    LaunchError,
    Placement,
    Processes,
    become_interruptible,
    plain_environment,
    rank_variables,
    start_nodes,
)
from bench.kit.record import header, metadata, parse_hosts, ticks
from scripts import prepare_data
from scripts import train as train_script
from scripts.children import count_gpus, free_ports, python_of_ranks, some_gpus
from scripts.progress import Progress, aligned
from scripts.trainkit.job import ENTRY, Record, read_record

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = 1
HEAD = (
    *("backend", "workers", "servers", "ms/step", "min..max", "tokens/s", "last loss"),
    *("GPU GB", "launches", "busy"),
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training setup of every launch."""

    tree: Path
    """Folder of the patched Megatron-LM."""
    arguments: Sequence[str]
    """Arguments of the entry script, the same for all backends."""
    warmup: int
    """Number of untimed steps at the beginning."""


NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
_SHARDED = ("--use-distributed-optimizer",)
_HALF = ("--grad-reduce-in-bf16",)
_OVERLAP = "--overlap-grad-reduce"
_TOLERANCES = {"bf16": 2e-2, "int8": 2e-2, "int4": 1e-1}
"""Allowed relative differences of losses, by the type in which gradients are summed or travel."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to sum gradients and to hold the optimizer's state."""

    name: str
    arguments: tuple[str, ...] = ()
    """Arguments of the entry script that this way adds to the common ones. ``{hosts}`` is the
    number of hosts."""
    settings: Mapping[str, str] = NO_SETTINGS
    """Environment variables of all nodes."""
    through_servers: bool = False
    loss_tolerance: float = 1e-3
    """Allowed relative difference between this way's losses and another way's."""
    overlaps_forward: bool = True
    """Whether parameters may be gathered during the next forward pass."""

    def megatron_arguments(self, hosts: int, common: Sequence[str]) -> list[str]:
        """Return the arguments. Parameters overlap the forward pass if gradients overlap, too."""
        own = [word.format(hosts=hosts) for word in self.arguments]
        gathers = self.overlaps_forward and {_SHARDED[0], "--dpu-optimizer"} & set(own)
        if gathers and _OVERLAP in common:
            own.append("--overlap-param-gather")
        return own


def _ways() -> Iterator[Way]:
    """Yield each layout twice: with torch.distributed and, named ``byteps-...``, with
    ``--use-dpu-reduce``."""
    inside = (*_SHARDED, "--num-distributed-optimizer-instances", "{hosts}")
    for name, arguments in (
        ("all-reduce", ()),
        ("sharded", _SHARDED),
        ("sharded-bf16", (*_SHARDED, *_HALF)),
        # The optimizer is sharded inside each host.
        ("by-host", inside),
        ("by-host-bf16", (*inside, *_HALF)),
    ):
        yield _way(name, arguments)
        short = "byteps" if name == "all-reduce" else f"byteps-{name}"
        through = (*arguments, "--use-dpu-reduce")
        yield _way(short, through)
        for wire in ("bf16", "int8", "int4") if not name.endswith("bf16") else ():
            yield _way(f"{short}-wire-{wire}", (*through, "--dpu-reduce-wire-dtype", wire))
    # This is the sharded recipe with one more flag.
    recipe = (*_SHARDED, *_HALF, "--dpu-optimizer")
    yield _way("sharded-bf16-on-servers", recipe)
    # Servers keep the optimizer. Ranks that share a host reduce first, except in "...-flat". In
    # "...-copies" each server's state is copied to another server.
    servers = (*_HALF, "--use-dpu-reduce", "--dpu-optimizer")
    for name, more in (
        ("servers-bf16", ()),
        ("servers-bf16-flat", ("--dpu-reduce-backend", "flat")),
        ("servers-int8", ("--dpu-reduce-wire-dtype", "int8")),
        # Gradients are pushed in four bits, and differences of parameters are pulled in eight.
        ("servers-int4", ("--dpu-reduce-wire-dtype", "int4")),
    ):
        yield _way(name, (*servers, *more))
    waits = _way("servers-int8-waits", (*servers, "--dpu-reduce-wire-dtype", "int8"))
    yield replace(waits, overlaps_forward=False)
    copies = {"BYTEPS_BACKUP_STATE": "1", "BYTEPS_REPLACE_SERVERS_S": "60"}
    yield _way("servers-bf16-copies", servers, copies)


def _way(name: str, arguments: tuple[str, ...], settings: Mapping[str, str] = NO_SETTINGS) -> Way:
    types = set(name.split("-")) & set(_TOLERANCES)
    return Way(
        name=name,
        arguments=arguments,
        settings=settings,
        through_servers=any(flag in arguments for flag in ("--use-dpu-reduce", "--dpu-optimizer")),
        loss_tolerance=max((_TOLERANCES[dtype] for dtype in types), default=Way.loss_tolerance),
    )


WAYS = {way.name: way for way in _ways()}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a launch."""

    backend: str
    """Name of the way."""
    index: int
    step_s: list[float]
    """Seconds of each timed step."""
    tokens: int
    """Tokens per step, of all workers."""
    losses: list[float]
    """Loss of every step, not rounded."""
    checksum: str
    """Checksum of the final parameters."""
    busy: float
    """Busy fraction of this machine's cores during the launch, including its start."""
    gpu_bytes: int = 0
    """Peak GPU memory allocated by torch on a rank; 0 without GPUs."""
    routes: str = ""
    """Routes of gradients, as printed by rank 0."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


def step_seconds(record: Record, warmup: int) -> list[float]:
    """Return the seconds of each step after the first ``warmup`` steps. Raises LaunchError if none
    is left."""
    # The begin of the first step is not recorded, so at least one step is not timed.
    ends = [step.seconds for step in record.steps][max(warmup, 1) - 1 :]
    spans = [after - before for before, after in itertools.pairwise(ends)]
    if not spans:
        raise LaunchError(f"{len(record.steps)} steps, {warmup} of them warm-up: nothing is timed")
    return spans


def arguments_of(what: Training, way: Way, hosts: int, route: str) -> list[str]:
    """Return Megatron's arguments. A way that names its route keeps it."""
    routed = ("--dpu-reduce-backend", route) if way.through_servers else ()
    return [*what.arguments, *routed, *way.megatron_arguments(hosts, what.arguments)]


def gpus_of(rank: int, ranks_per_host: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for a rank's host, with one GPU per rank.

    If hosts outnumber GPUs, they share them evenly. A host sees only the GPUs that it uses: torch
    takes the rank modulo the number of visible GPUs for the GPU's number, and hangs if that is
    wrong.

    Raises:
        LaunchError: a host has more ranks than there are GPUs.
    """
    if ranks_per_host > count_gpus():
        raise LaunchError(f"{ranks_per_host} ranks per host need as many GPUs, not {count_gpus()}")
    return some_gpus(rank // ranks_per_host * ranks_per_host, ranks_per_host)


def train(
    plan: Plan, what: Training, way: Way, index: int, hosts: Sequence[Host], route: str = "auto"
) -> Trained:
    """Start scheduler, servers and ranks, wait for their end, and read the record of steps.

    Raises:
        LaunchError: a process failed or timed out, or there is no record.
    """
    with (
        tempfile.TemporaryDirectory(prefix="train-bench-") as folder,
        Processes(Path(folder)) as processes,
    ):
        placement = Placement(plan.topology, hosts, shares_gpus=plan.shares_gpus())
        record_file = Path(folder) / "steps.jsonl"
        environment = {**plain_environment(), "PYTHONWARNINGS": "ignore"}
        if plan.device == "cpu":
            environment["MEGATRON_CPU"] = "1"
        arguments = arguments_of(what, way, plan.topology.worker_hosts, route)
        arguments += ["--record-steps", str(record_file)]
        environment |= way.settings
        if way.through_servers:
            environment |= start_nodes(placement, processes, environment)[1]
        environment |= {
            "MASTER_ADDR": placement.workers[0].address,
            "MASTER_PORT": str(free_ports()),
        }
        before = ticks()
        for rank, host in enumerate(placement.workers):
            command = [python_of_ranks(), str(what.tree / ENTRY), *arguments]
            variables = rank_variables(rank, placement)
            if plan.device == "cuda":
                variables["CUDA_VISIBLE_DEVICES"] = gpus_of(rank, plan.topology.ranks_per_host)
            processes.start(f"worker-{rank}", command, host, {**environment, **variables})
        processes.wait_all(plan.timeout_s)
        busy = (ticks() - before).fraction
        record = read_record(record_file)
        routes = routes_in(processes.text_of("worker-0"))
        if not record.checksum:
            raise LaunchError(f"training ended without its record\n{processes.logs()}")
    return Trained(
        backend=way.name,
        index=index,
        step_s=step_seconds(record, what.warmup),
        tokens=record.steps[-1].tokens,
        losses=[step.loss for step in record.steps],
        checksum=record.checksum,
        busy=busy,
        gpu_bytes=record.gpu_bytes,
        routes=routes,
    )


def routes_in(log: str) -> str:
    """Return the tables of routes and reasons that a rank has printed."""
    lines, inside = [], False
    for line in log.splitlines():
        inside = line.startswith("dpu_reduce: ") or (inside and line.startswith("  "))
        if inside:
            lines.append(line)
    return "\n".join(lines)


def show_memory(launches: Sequence[Trained]) -> str:
    """Format the peak GPU memory of all launches, in GB."""
    most = max(launch.gpu_bytes for launch in launches)
    return f"{most / 1e9:.2f}" if most else "-"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    positive = train_script.positive
    add = parser.add_argument
    add("--workers", type=positive, default=2, help="default: 2")
    add("--servers", type=positive, default=1, help="default: 1")
    add("--ranks-per-host", type=positive, default=1, metavar="R", help="default: 1")
    add("--ways", default="byteps,all-reduce", metavar="LIST", help=f"of {', '.join(WAYS)}")
    add(
        "--route",
        choices=("auto", "flat", "node-first", "collective"),
        help="--dpu-reduce-backend (default: flat with one rank per host, else node-first)",
    )
    add("--colocate", action="store_true", help="servers on the workers' hosts")
    add("--emulate", metavar="HOSTS@RATE", help="such as 8@500mbit; needs root")
    add("--nics-per-host", type=positive, default=1, metavar="N", help="of --emulate (default: 1)")
    add("--steps", type=positive, default=30, help="of a launch (default: 30)")
    add("--warmup", type=positive, default=5, help="of these, not timed (default: 5)")
    add("--launches", type=positive, default=3, help="of each backend, interleaved (default: 3)")
    add("--timeout", type=float, default=600.0, help="s for a launch, against hangs")
    add("--seed", type=positive, default=1234, help="default: 1234")
    add("--data", type=Path, nargs="+", default=[], help="text (default: Python's own library)")
    add("--max-bytes", type=positive, default=prepare_data.DEFAULT_MAX_BYTES, help="of text")
    add("--data-cache", type=Path, default=ROOT / "build" / "data", help="default: build/data")
    add("--tree", type=Path, default=ROOT / "build" / "Megatron-LM", help="patched Megatron-LM")
    add("--json", type=Path, metavar="FILE", help="everything, with the time of each step")
    add("--min-ratio", type=float, metavar="X", help="threshold: speed over each other one")
    add("megatron", nargs="*", metavar="-- ARGUMENTS", help="for Megatron; they win")
    options = parser.parse_args(arguments)
    try:
        options.plan = make_plan(options)
        options.ways = choose_ways(options.ways)
    except ValueError as error:
        parser.error(str(error))
    return options


def choose_ways(text: str) -> list[Way]:
    """Parse a list of ways. Raises ValueError."""
    names = text.split(",")
    unknown = [name for name in names if name not in WAYS]
    if unknown or len(set(names)) != len(names):
        raise ValueError(f"--ways {text}: name each once, of {', '.join(WAYS)}")
    return [WAYS[name] for name in names]


def make_plan(options: argparse.Namespace) -> Plan:
    """Build the plan from the options. Raises ValueError."""
    if options.steps <= options.warmup:
        raise ValueError(f"--steps {options.steps} leaves none after --warmup {options.warmup}")
    hosts, bits = parse_hosts(options.emulate) if options.emulate else (0, 0)
    on_gpu = train_script.on_gpu()
    return Plan(
        cases=(),
        topology=Topology(
            workers=options.workers,
            servers=options.servers,
            ranks_per_host=options.ranks_per_host,
            colocate=options.colocate,
            emulated_hosts=hosts,
            link_bits=bits,
            nics_per_host=options.nics_per_host,
        ),
        backends=("byteps", "nccl" if on_gpu else "gloo"),
        launches=options.launches,
        device="cuda" if on_gpu else "cpu",
        timeout_s=options.timeout,
    )


def run(options: argparse.Namespace) -> list[Trained]:
    """Make all launches. Raises LaunchError, EmulationError, DataError."""
    plan: Plan = options.plan
    dataset = prepare_data.prepare(options.data, options.data_cache, options.max_bytes)
    what = Training(
        tree=options.tree.resolve(),
        arguments=train_script.megatron_arguments(options, dataset.prefix),
        warmup=options.warmup,
    )
    done: list[Trained] = []
    total = plan.launches * len(options.ways)
    with hosts_of(plan) as hosts, Progress("training", total=total, unit="launches") as shown:
        for index in range(plan.launches):
            for way in options.ways:
                shown.update(f"launch {index} {way.name}", done=len(done))
                route = options.route or ("flat" if options.ranks_per_host == 1 else "node-first")
                launch = train(plan, what, way, index, hosts, route)
                if (
                    route == "auto"
                    and launch.routes
                    and way.name not in {old.backend for old in done}
                ):
                    shown.say(launch.routes)
                done.append(launch)
                shown.say(
                    f"launch {index} {way.name}: {launch.median_s * 1e3:.1f} ms per step; "
                    f"machine {launch.busy:.0%} busy"
                )
    return done


def row(way: Way, done: Sequence[Trained], topology: Topology) -> Sequence[str]:
    """Return a way's row of the table."""
    own = [launch for launch in done if launch.backend == way.name]
    medians = [launch.median_s for launch in own]
    middle = statistics.median(medians)
    return (
        way.name,
        str(topology.workers),
        str(topology.servers) if way.through_servers else "-",
        f"{middle * 1e3:.1f}",
        f"{min(medians) * 1e3:.1f}..{max(medians) * 1e3:.1f}",
        f"{own[0].tokens / middle:,.0f}",
        f"{own[-1].losses[-1]:.4f}",
        show_memory(own),
        str(len(own)),
        f"{max(launch.busy for launch in own):.0%}",
    )


def ratio(done: Sequence[Trained], backends: Sequence[str]) -> tuple[float, float, float]:
    """Return how many times as fast the first backend is as the second. The first number is by the
    medians of all launches, the least and the most by the two launches of a round."""
    ours, theirs = (
        [launch.median_s for launch in done if launch.backend == name] for name in backends
    )
    each = [b / a for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(theirs) / statistics.median(ours), min(each), max(each)


def complaint(done: Sequence[Trained], workers: int) -> str | None:
    """Describe how the losses of launches differ; None if they agree."""
    first, *others = done
    exact = ("byteps", "all-reduce")
    for other in others:
        name = f"launch {other.index} of {other.backend}"
        few = workers <= train_script.EXACT_WORKERS
        same = {first.backend, other.backend} <= set(exact)
        if few and same and first.checksum != other.checksum:
            return (
                f"{name}: parameters differ from those of {first.backend}; "
                "with two workers they may not"
            )
        tolerance = max(WAYS[launch.backend].loss_tolerance for launch in (first, other))
        # Values are compared one by one, because max() may skip NaN.
        for step, (a, b) in enumerate(zip(first.losses, other.losses, strict=True), 1):
            apart = abs(a - b) / abs(a)
            if not apart <= tolerance:
                return f"{name}: the loss of step {step} differs by {apart:.1e} of it"
    return None


def report(done: Sequence[Trained], options: argparse.Namespace, words: Sequence[str]) -> int:
    """Print and write the results. Return the exit status."""
    plan: Plan = options.plan
    meta = {**metadata(words), "steps": f"{options.steps}, {options.warmup} of them not timed"}
    print(header(meta, plan))
    print(aligned([HEAD, *(row(way, done, plan.topology) for way in options.ways)]) + "\n")
    ours, *others = (way.name for way in options.ways)
    ratios = {other: ratio(done, (ours, other)) for other in others}
    for other, (value, low, high) in ratios.items():
        print(f"{ours} over {other}: {value:.3f} ({low:.3f}..{high:.3f}) times as fast")
    wrong = complaint(done, plan.topology.workers)
    if wrong:
        print(f"train_bench.py: {wrong}", file=sys.stderr)
    missed = False
    for other, (value, _, _) in ratios.items():
        if options.min_ratio is not None and value < options.min_ratio:
            missed = True
            print(f"train_bench.py: {value:.3f} over {other} is below {options.min_ratio:g}")
    if options.json:
        whole = {"schema": SCHEMA, "meta": meta, "plan": plan.as_json()}
        whole |= {"ratios": {other: value for other, (value, _, _) in ratios.items()}}
        whole |= {"launches": [asdict(launch) for launch in done]}
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong or missed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not (options.tree / "pretrain_dpu_gpt.py").is_file():
        print(f"train_bench.py: {options.tree} is no patched Megatron-LM: run `make setup`")
        return 1
    try:
        done = run(options)
    except (LaunchError, EmulationError, prepare_data.DataError) as error:
        print(f"train_bench.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was started has been ended", file=sys.stderr)
        return 130
    return report(done, options, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
