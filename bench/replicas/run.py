#!/usr/bin/env python3
"""Compares what a GPT learns from replicas that meet at servers with what one job learns.

Trains one model, of one seed and order of data, as one job of as many ranks as there are replicas,
and as replicas that sum gradients in each step (1), or step by themselves and exchange parameters
once in H steps. Prints the mean loss of the last steps of each, relative to the one job's, and what
a replica sent per step.

With --sites each replica is at a site of its own, and so are the servers, and the one job is left
out. With --pace the passes of a step take a given time at least, as on machines of their own. Then
the table compares times of a step: name first, as the one to compare with, an H at which nothing is
exchanged.

  bench/replicas/run.py                                       a small GPT on this machine
  bench/replicas/run.py --every 10,30 --after 60 --lr 0.8 --momentum 0.5
  bench/replicas/run.py --every 1000,30 --steps 90 --sites 100mbit@50ms --pace 1.5
                                                              steps on links between sites
  bench/replicas/run.py --from-json RESULT --plot CURVES.png

Exit status: 0 all is well; 1 a run failed, or a difference is above its limit; 2 bad usage.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.kit import gpt
from bench.kit.emulation import LOOPBACK, Host
from bench.kit.errors import LaunchError
from bench.kit.launch import Placement, start_nodes
from bench.kit.plan import Topology
from bench.kit.processes import Processes, plain_environment
from bench.kit.record import metadata
from bench.kit.units import parse_rate
from scripts import prepare_data
from scripts import train as train_script
from scripts.columns import aligned
from scripts.ports import free_ports
from scripts.trainkit.job import ENTRY, Record, read_record
from tests.netkit.switch import DEVICE, Rule, Switch

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = 1
PACED = Path(__file__).with_name("paced_gpt.py")
LAST = 50
"""Steps whose losses are compared."""
ONE_JOB = "one job"
HEAD = (
    *("trained by", f"loss, last {LAST} steps", "over the first", "after exchanges"),
    *("kB per step", "s per step", "over the first"),
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    positive = train_script.positive
    add = parser.add_argument
    add("--replicas", type=positive, default=4, help="default: 4")
    add("--ranks", type=positive, default=1, help="of each replica (default: 1)")
    add("--every", default="1,10,30", help="steps from one exchange to the next (default: 1,10,30)")
    add("--after", type=int, default=0, help="steps with summed gradients first (default: 0)")
    add("--lr", type=float, default=0.7, help="of outer steps (default: 0.7)")
    add("--momentum", type=float, default=0.9, help="of outer steps (default: 0.9)")
    add("--delay", type=int, default=0, help="steps that an exchange may take (default: 0)")
    add("--fragments", type=positive, default=1, help="of the model (default: 1)")
    add("--servers", type=positive, default=1, help="default: 1")
    add("--batch", type=positive, default=4, help="sequences per replica and step (default: 4)")
    gpt.add_model(add)
    add("--seed", type=positive, default=1234, help="default: 1234")
    add("--model-ranks", type=positive, default=1, help="that share one copy of the model")
    add("--at-most", default="", metavar="H=X,...", help="fail where a difference is above X")
    add("--at-most-slower", default="", metavar="H=X,...", help="the same of the time of a step")
    add("--sites", metavar="RATE@RTT", help="links between sites, such as 100mbit@50ms; needs root")
    add("--pace", type=float, default=0.0, help="seconds that the passes of a step take at least")
    add("--timeout", type=float, default=3600.0, help="seconds that a run may take")
    gpt.add_files(add, "replicas")
    options = parser.parse_args(arguments)
    try:
        options.sites = sites_of(options.sites) if options.sites else None
    except ValueError as error:
        parser.error(f"--sites: {error}")
    try:
        options.every = [positive(text) for text in options.every.split(",")]
    except (ValueError, argparse.ArgumentTypeError):
        parser.error("--every is numbers of steps, such as 1,10,30")
    for name in ("at_most", "at_most_slower"):
        try:
            setattr(options, name, gpt.limits(getattr(options, name), int))
        except ValueError:
            parser.error(f"--{name.replace('_', '-')} is written like 10=0.01,30=0.015")
    return options


def sites_of(text: str) -> Rule:
    """What becomes of packets from one site to another."""
    rate, _, rtt = text.partition("@")
    if not rtt.endswith("ms"):
        raise ValueError(f"{text!r} is not RATE@RTT, such as 100mbit@50ms")
    one_way, bytes_per_s = float(rtt.removesuffix("ms")) / 2000, parse_rate(rate) / 8
    # A queue of as many bytes as are on the way, as routers between sites have.
    return Rule(
        delay_s=one_way,
        bytes_per_s=bytes_per_s,
        queue_bytes=max(100_000, int(2 * one_way * bytes_per_s)),
    )


@contextmanager
def hosts_of(options: argparse.Namespace) -> Iterator[Sequence[Host]]:
    """One for each replica and one for the servers, or this machine for all."""
    if options.sites is None:
        yield [LOOPBACK]
        return
    with Switch(options.replicas + 1) as switch:
        for pair in itertools.permutations(range(options.replicas + 1), 2):
            switch.set_rule(*pair, options.sites)
        yield [
            Host(address=host.address, interfaces=(DEVICE,), namespace=host.namespace)
            for host in switch.hosts
        ]


def megatron_arguments(options: argparse.Namespace, prefix: Path) -> list[str]:
    """All that runs share."""
    slots = options.replicas * options.ranks // options.model_ranks
    batch = ["--global-batch-size", str(options.batch * slots)]
    return [*batch, *gpt.megatron_arguments(options, prefix, options.seed)]


def outer_arguments(options: argparse.Namespace, every: int) -> list[str]:
    arguments = ["--use-dpu-reduce", "--dpu-outer-steps", str(every)]
    if every == 1:
        return arguments
    arguments += ["--dpu-outer-after", str(options.after)]
    arguments += ["--dpu-outer-lr", str(options.lr)]
    arguments += ["--dpu-outer-momentum", str(options.momentum)]
    arguments += ["--dpu-outer-delay", str(options.delay)]
    return [*arguments, "--dpu-outer-fragments", str(options.fragments)]


def arguments_of_world(number: int) -> list[str]:
    """What the ranks of one torch.distributed world are given in addition; a test's to replace."""
    del number
    return []


def train(options: argparse.Namespace, prefix: Path, every: int | None) -> dict[str, Any]:
    """The mean loss of every step, and the bytes that replica 0 pushed by then.

    Args:
        every: steps from one exchange of replicas to the next; None: one job.

    Raises:
        LaunchError: a process failed or was late.
    """
    count, ranks = options.replicas, options.ranks
    with (
        hosts_of(options) as hosts,
        tempfile.TemporaryDirectory(prefix="replicas-") as folder,
        Processes(Path(folder)) as processes,
    ):
        topology = Topology(workers=count * ranks, servers=1, ranks_per_host=ranks)
        placement = Placement(topology, hosts)
        placement.servers *= options.servers
        placement.scheduler = placement.servers[0]
        environment = {**plain_environment(), "PYTHONWARNINGS": "ignore"}
        if not train_script.on_gpu():
            environment["MEGATRON_CPU"] = "1"
        environment |= {"PACE_S": str(options.pace), "PYTHONPATH": str(options.tree)}
        arguments = megatron_arguments(options, prefix)
        entry = [str(PACED)] if options.pace else []
        entry.append(str(options.tree / ENTRY))
        records: list[Path] = []
        if every is not None:
            arguments += outer_arguments(options, every)
            environment |= start_nodes(placement, processes, environment)[1]
        size = count * ranks if every is None else ranks
        ports = [free_ports() for _ in range(count)]
        for number in range(count * ranks):
            world, rank = divmod(number, size)
            host = placement.workers[number]
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": host.address,
                "MASTER_PORT": str(ports[world]),
            }
            if every is not None:
                variables["BYTEPS_REPLICA"] = f"{world}/{count}"
            if rank == 0:
                records.append(Path(folder) / f"steps-{world}.jsonl")
            command = [sys.executable, *entry, *arguments]
            command += ["--record-steps", str(records[-1]), *arguments_of_world(world)]
            processes.start(f"rank-{number}", command, host, {**environment, **variables})
        processes.wait_all(options.timeout)
        found = [read_record(path) for path in records]
        if not all(record.checksum for record in found):
            raise LaunchError(f"training ended without its record\n{processes.logs()}")
    return {"every": every, "after": options.after, **summary(found)}


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Of the records of all replicas, or of one job."""
    steps = zip(*(record.steps for record in records), strict=True)
    first = records[0].steps
    return {
        "ends_s": [step.seconds for step in first],
        "pushed_bytes": [step.pushed_bytes for step in first],
        "losses": [statistics.fmean(step.loss for step in one) for one in steps],
        "checksums": sorted({record.checksum for record in records}),
    }


def name_of(every: int | None) -> str:
    if every is None:
        return ONE_JOB
    return "replicas, each step" if every == 1 else f"replicas, once in {every} steps"


def over(runs: dict[str, Any], name: str, of: Callable[[dict[str, Any]], float]) -> float:
    """How far something is above what it is in the first run, relative."""
    return of(runs[name]) / of(next(iter(runs.values()))) - 1


def loss(run: dict[str, Any]) -> float:
    return statistics.fmean(run["losses"][-LAST:])


def per_step(run: dict[str, Any], what: str) -> float:
    """How much is added to something in a step, in the mean: over as many whole exchanges as there
    are in the last two thirds of the run, or over all of these steps."""
    values = run[what]
    steps = len(values) - 1 - len(values) // 3
    steps = steps // run["every"] * run["every"] or steps if run["every"] else steps
    return (values[-1] - values[-1 - steps]) / max(1, steps)


def common_loss(run: dict[str, Any], first: dict[str, Any]) -> float | None:
    """Of the steps that begin with the model that all replicas have, right after an exchange, in
    the second half: how far the loss is above that of the first run in the same steps, which have
    the same data. None where there are no such steps."""
    every, after = run["every"], run["after"]
    if not every or every == 1:
        return None
    mine, theirs = run["losses"], first["losses"]
    begins = range(after + every, len(mine), every)
    apart = [mine[at] / theirs[at] - 1 for at in begins if at >= len(mine) // 2]
    return statistics.fmean(apart) if apart else None


def step_s(run: dict[str, Any]) -> float:
    return per_step(run, "ends_s")


def rows(runs: dict[str, Any]) -> list[Sequence[str]]:
    table: list[Sequence[str]] = [HEAD]
    first = next(iter(runs))
    for name, run in runs.items():
        apart = ["", ""]
        if name != first:
            apart = [f"{over(runs, name, of):+.2%}" for of in (loss, step_s)]
        common = common_loss(run, runs[first])
        cells = [name, f"{loss(run):.4f}", apart[0], "" if common is None else f"{common:+.2%}"]
        cells.append(f"{per_step(run, 'pushed_bytes') / 1e3:.1f}")
        table.append([*cells, f"{step_s(run):.3f}", apart[1]])
    return table


def problems(
    runs: dict[str, Any], at_most: dict[int, float], slower: dict[int, float]
) -> list[str]:
    """Losses and times above their limits."""
    first, found = next(iter(runs)), []
    for what, of, limits in (("loss", loss, at_most), ("time of a step", step_s, slower)):
        for every, limit in limits.items():
            above = over(runs, name_of(every), of)
            if not above <= limit:
                found.append(
                    f"{name_of(every)}: the {what} is {above:+.2%} over that of {first}, more than "
                    f"{limit:.2%}"
                )
    return found


def draw(runs: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, (name, run) in enumerate(runs.items()):
        axes.plot(gpt.smooth(run["losses"], 10), label=name, color=f"C{number}", linewidth=1.2)
    axes.set_xlabel("step; each point is the mean of 10")
    axes.set_ylabel("loss per byte, mean of replicas")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train all. Raises LaunchError where a run fails."""
    dataset = prepare_data.prepare(options.data, options.data_cache, options.max_bytes)
    runs = {}
    for every in (*([None] if options.sites is None else []), *options.every):
        run = train(options, dataset.prefix, every)
        runs[name_of(every)] = run
        print(f"{name_of(every)}: {loss(run):.4f} in {run['ends_s'][-1]:.0f} s", flush=True)
    return {"schema": SCHEMA, "meta": metadata(sys.argv[1:]), "runs": runs}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.from_json:
        result = json.loads(options.from_json.read_text(encoding="utf-8"))
    else:
        try:
            result = measure(options)
        except LaunchError as error:
            print(f"bench/replicas/run.py: {error}", file=sys.stderr)
            return 1
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "replicas.json").write_text(json.dumps(result) + os.linesep)
    print("\n".join(f"# {name}: {text}" for name, text in result["meta"].items()))
    print(aligned(rows(result["runs"])))
    if options.plot:
        draw(result["runs"], options.plot)
    wrong = problems(result["runs"], options.at_most, options.at_most_slower)
    print("\n".join(wrong) or "# no difference is above its limit")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
