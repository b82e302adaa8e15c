#!/usr/bin/env python3
"""Compares the loss of a GPT trained by replicas, which meet at servers, with that of a single job.

Trains the same model, with the same seed and data order, in three ways: as a single job with one
rank per replica; as replicas that sum gradients in each step (1); and as replicas that step on
their own and exchange parameters once in H steps. Prints the mean loss of the last steps relative
to the single job's, and the bytes that a replica has sent per step.

With --sites each replica has a site of its own, and so have the servers; the single job is left
out. With --pace the passes of a step take at least a given time, as on separate machines. Then the
table compares times per step. The reference is the first H, so give one first at which nothing is
exchanged.

Runs of the same seed begin with the same parameters and see the same data. They are compared seed
by seed, and with several seeds a 95 % interval is shown. Ranks are spread over this machine's GPUs.
Runs that share GPUs need --alone, because NCCL would hold a GPU for one run while it waits for
another.

  bench/replicas/run.py                                       a small GPT on this machine
  bench/replicas/run.py --every 10@60,30@60 --lr 0.8 --momentum 0.5
                                                              after 60 steps of summed gradients
  bench/replicas/run.py --every 1000,30 --steps 90 --sites 100mbit@50ms --pace 1.5
                                                              steps on links between sites
  bench/replicas/run.py --from-json RESULT --plot CURVES.png

Exit status: 0 success; 1 a run failed, or a difference is above its limit; 2 bad usage.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.kit import gpt
from bench.kit.emulation import LOOPBACK, Host
from bench.kit.plan import Topology
from bench.kit.processes import LaunchError, Placement, Processes, plain_environment, start_nodes
from bench.kit.record import metadata, parse_rate
from scripts import children, prepare_data
from scripts import train as train_script
from scripts.children import free_ports, python_of_ranks
from scripts.progress import aligned
from scripts.trainkit.job import ENTRY, Record, read_record
from tests.netkit.switch import DEVICE, Rule, Switch

Run = dict[str, Any]
"""Run of a seed: ``losses``, ``ends_s`` and ``pushed_bytes`` of every step, ``every``,
``after``."""
Runs = Mapping[str, Sequence[Run]]
"""Runs by name, one per seed in the same order. All others are compared with the first name."""

LAST = 50
"""Number of last steps whose losses are compared."""
HEAD = (
    *("trained by", f"loss, last {LAST} steps", "over the first", "after exchanges"),
    *("kB per step", "s per step", "over the first"),
)


def loss(run: Run) -> float:
    return statistics.fmean(run["losses"][-LAST:])


def per_step(run: Run, what: str) -> float:
    """Return the mean increase of a value per step, over whole exchanges in the last two thirds of
    the run. If there is no whole exchange, take all steps of that part."""
    values = run[what]
    steps = len(values) - 1 - len(values) // 3
    steps = steps // run["every"] * run["every"] or steps if run["every"] else steps
    return (values[-1] - values[-1 - steps]) / max(1, steps)


def step_s(run: Run) -> float:
    return per_step(run, "ends_s")


def over(runs: Runs, name: str, of: Callable[[Run], float]) -> list[float]:
    """Return, for each seed, the relative difference between a value and the first run's."""
    first = next(iter(runs.values()))
    return [of(own) / of(theirs) - 1 for own, theirs in zip(runs[name], first, strict=True)]


def common_loss(run: Run, first: Run) -> float | None:
    """Return the mean difference between the losses of a run and those of the first run, in the
    same steps, which have the same data. Only steps of the second half right after an exchange
    count, because all replicas then have the same model. None if there is no such step."""
    every, after = run["every"], run["after"]
    if not every or every == 1:
        return None
    own, theirs = run["losses"], first["losses"]
    begins = range(after + every, len(own), every)
    apart = [own[at] / theirs[at] - 1 for at in begins if at >= len(own) // 2]
    return statistics.fmean(apart) if apart else None


def rows(runs: Runs) -> list[Sequence[str]]:
    table: list[Sequence[str]] = [HEAD]
    first = next(iter(runs))
    for name, seeds in runs.items():
        apart = ["", ""]
        if name != first:
            slower = statistics.fmean(over(runs, name, step_s))
            apart = [_relative(over(runs, name, loss)), f"{slower:+.2%}"]
        common = [common_loss(*pair) for pair in zip(seeds, runs[first], strict=True)]
        known = [ratio for ratio in common if ratio is not None]
        pushed = statistics.fmean(per_step(run, "pushed_bytes") for run in seeds)
        table.append(
            [
                *(name, f"{_mean(loss, seeds):.4f}", apart[0], _relative(known) if known else ""),
                *(f"{pushed / 1e3:.1f}", f"{_mean(step_s, seeds):.3f}", apart[1]),
            ]
        )
    return table


def _mean(of: Callable[[Run], float], seeds: Sequence[Run]) -> float:
    return statistics.fmean(map(of, seeds))


def _relative(values: Sequence[float]) -> str:
    """Format the mean of several values, with the half width of its 95 % interval."""
    mean, low, _ = gpt.interval(values)
    return f"{mean:+.2%}" + (f" ±{mean - low:.2%}" if len(values) > 1 else "")


def problems(
    runs: Runs, names: Mapping[str, str], at_most: Mapping[str, float], slower: Mapping[str, float]
) -> list[str]:
    """Return descriptions of losses and times above their limits. ``names`` maps the limits' keys
    to names of ``runs``."""
    first, wrong = next(iter(runs)), []
    for what, of, limits in (("loss", loss, at_most), ("time of a step", step_s, slower)):
        for key, limit in limits.items():
            above = statistics.fmean(over(runs, names[key], of))
            if not above <= limit:
                wrong.append(
                    f"{names[key]}: the {what} is {above:+.2%} over that of {first}, more than "
                    f"{limit:.2%}"
                )
    return wrong


def draw(runs: Runs, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    means = {name: _mean_losses(seeds) for name, seeds in runs.items()}
    first = next(iter(means.values()))
    smooth = max(10, len(first) // 50)
    for number, (name, losses) in enumerate(means.items()):
        above.plot(gpt.smooth(losses, smooth), label=name, color=f"C{number}", linewidth=1.2)
        apart = [100 * (own / theirs - 1) for own, theirs in zip(losses, first, strict=True)]
        below.plot(gpt.smooth(apart, smooth), color=f"C{number}", linewidth=1.0)
    above.set_ylabel("loss per byte, mean of replicas")
    below.set_ylabel(f"% over {next(iter(runs))}")
    below.set_xlabel(f"step; each point is the mean of {smooth}")
    above.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _mean_losses(seeds: Sequence[Run]) -> list[float]:
    return [statistics.fmean(step) for step in zip(*(run["losses"] for run in seeds), strict=True)]


ROOT = Path(__file__).resolve().parents[2]
SCHEMA = 2
PACED = Path(__file__).with_name("paced_gpt.py")
ONE_JOB = "one job"
Setting = tuple[int, int]
"""Steps between two exchanges, and number of initial steps with summed gradients."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    positive = train_script.positive
    add = parser.add_argument
    add("--replicas", type=positive, default=4, help="default: 4")
    add("--ranks", type=positive, default=1, help="of each replica (default: 1)")
    add(
        "--every",
        default="1,10,30",
        metavar="H[@N],...",
        help="steps from one exchange to the next, after N steps with summed gradients (default: "
        "%(default)s)",
    )
    add("--lr", type=float, default=0.7, help="of outer steps (default: 0.7)")
    add("--momentum", type=float, default=0.9, help="of outer steps (default: 0.9)")
    add("--delay", type=int, default=0, help="steps that an exchange may take (default: 0)")
    add("--fragments", type=positive, default=1, help="of the model (default: 1)")
    add("--servers", type=positive, default=1, help="default: 1")
    add("--batch", type=positive, default=4, help="sequences per replica and step (default: 4)")
    gpt.add_model(add)
    add("--seeds", type=positive, default=1, help="runs of each (default: 1)")
    add("--at-once", type=positive, default=1, help="runs that share this machine (default: 1)")
    add("--alone", action="store_true", help="the one job is one rank with all of them")
    add("--model-ranks", type=positive, default=1, help="that share one copy of the model")
    add("--at-most", default="", metavar="H[@N]=X,...", help="fail where a loss is X above")
    add("--at-most-slower", default="", metavar="H[@N]=X,...", help="or a step's time")
    add("--sites", metavar="RATE@RTT", help="links between sites, such as 100mbit@50ms; needs root")
    add("--pace", type=float, default=0.0, help="seconds that the passes of a step take at least")
    add("--timeout", type=float, default=3600.0, help="seconds that a run may take")
    gpt.add_files(add, "replicas")
    options = parser.parse_args(arguments)
    options.tree = options.tree.resolve()  # absolute, because ranks have other working directories
    if options.alone and options.model_ranks > 1:
        parser.error("--alone: a model on one rank has --model-ranks 1")
    try:
        options.sites = sites_of(options.sites) if options.sites else None
    except ValueError as error:
        parser.error(f"--sites: {error}")
    try:
        options.settings = {text: setting_of(text) for text in options.every.split(",")}
    except (ValueError, argparse.ArgumentTypeError):
        parser.error("--every is numbers of steps, such as 1,10,30 or 10@200,30@200")
    for name in ("at_most", "at_most_slower"):
        flag = f"--{name.replace('_', '-')}"
        try:
            setattr(options, name, gpt.limits(getattr(options, name), str))
        except ValueError:
            parser.error(f"{flag} is written like 10=0.01,30@200=0.015")
        if unknown := getattr(options, name).keys() - options.settings.keys():
            parser.error(f"{flag}: {', '.join(sorted(unknown))}: not in --every {options.every}")
    return options


def setting_of(text: str) -> Setting:
    every, _, after = text.partition("@")
    return train_script.positive(every), train_script.positive(after) if after else 0


def sites_of(text: str) -> Rule:
    """Return the rule for packets between sites."""
    rate, _, rtt = text.partition("@")
    if not rtt.endswith("ms"):
        raise ValueError(f"{text!r} is not RATE@RTT, such as 100mbit@50ms")
    one_way, bytes_per_s = float(rtt.removesuffix("ms")) / 2000, parse_rate(rate) / 8
    # The queue holds as many bytes as are in flight, as in routers between sites.
    return Rule(
        delay_s=one_way,
        bytes_per_s=bytes_per_s,
        queue_bytes=max(100_000, int(2 * one_way * bytes_per_s)),
    )


@contextmanager
def hosts_of(options: argparse.Namespace) -> Iterator[Sequence[Host]]:
    """Return a context with a host per replica and a host for the servers. Without sites, this
    machine is the host of all."""
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


def megatron_arguments(options: argparse.Namespace, prefix: Path, seed: int) -> list[str]:
    """Return the arguments that all runs share."""
    slots = options.replicas * options.ranks // options.model_ranks
    batch = ["--global-batch-size", str(options.batch * slots)]
    return [*batch, *gpt.megatron_arguments(options, prefix, seed)]


def outer_arguments(options: argparse.Namespace, setting: Setting) -> list[str]:
    every, after = setting
    if every == 1:
        return ["--use-dpu-reduce"]
    given = f"lr={options.lr},momentum={options.momentum},delay={options.delay}"
    outer = f"{every},after={after},{given},fragments={options.fragments}"
    return ["--use-dpu-reduce", "--dpu-outer", outer]


def alone(options: argparse.Namespace) -> argparse.Namespace:
    """Return options for a single rank that takes the sequences of all ranks."""
    sequences = options.batch * options.replicas * options.ranks
    return argparse.Namespace(**{**vars(options), "replicas": 1, "ranks": 1, "batch": sequences})


def arguments_of_world(number: int) -> list[str]:
    """Return more arguments for the ranks of a torch.distributed world. Tests replace this
    function."""
    del number
    return []


def import_path(tree: Path) -> str:
    """Return PYTHONPATH of a rank: the patched Megatron-LM, then this process's path."""
    return os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))


def gpus_of(world: int, rank: int, size: int) -> dict[str, str]:
    """Return a rank's variables that spread worlds over this machine's GPUs, round robin."""
    if not train_script.on_gpu():
        return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    shown = min(size, children.count_gpus())
    return {
        **children.place_among(rank, shown),
        "LOCAL_WORLD_SIZE": str(shown),
        "CUDA_VISIBLE_DEVICES": children.some_gpus(world * size, shown),
    }


def train(options: argparse.Namespace, prefix: Path, setting: Setting | None, seed: int = 1) -> Run:
    """Train. Return the mean loss of every step, and the number of bytes that replica 0 had pushed
    after it."""
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
        environment |= {"PACE_S": str(options.pace), "PYTHONPATH": import_path(options.tree)}
        arguments = megatron_arguments(options, prefix, seed)
        entry = [str(PACED)] if options.pace else []
        entry.append(str(options.tree / ENTRY))
        records: list[Path] = []
        if setting is not None:
            arguments += outer_arguments(options, setting)
        if setting is not None or "--dpu-optimizer" in arguments:
            environment |= start_nodes(placement, processes, environment)[1]
        size = count * ranks if setting is None else ranks
        ports = [free_ports() for _ in range(count)]
        for number in range(count * ranks):
            world, rank = divmod(number, size)
            host = placement.workers[number]
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                **gpus_of(world, rank, size),
                "MASTER_ADDR": host.address,
                "MASTER_PORT": str(ports[world]),
            }
            if setting is not None:
                variables["BYTEPS_REPLICA"] = f"{world}/{count}"
            if rank == 0:
                records.append(Path(folder) / f"steps-{world}.jsonl")
            command = [python_of_ranks(), *entry, *arguments]
            command += ["--record-steps", str(records[-1]), *arguments_of_world(world)]
            processes.start(f"rank-{number}", command, host, {**environment, **variables})
        processes.wait_all(options.timeout)
        finished = [read_record(path) for path in records]
        if not all(record.checksum for record in finished):
            raise LaunchError(f"training ended without its record\n{processes.logs()}")
    every, after = setting or (None, 0)
    return {"every": every, "after": after, "seed": seed, **summary(finished)}


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Summarize the records of all replicas, or of a single job."""
    steps = zip(*(record.steps for record in records), strict=True)
    first = records[0].steps
    return {
        "ends_s": [step.seconds for step in first],
        "pushed_bytes": [step.pushed_bytes for step in first],
        "losses": [statistics.fmean(step.loss for step in replicas) for replicas in steps],
        "checksums": sorted({record.checksum for record in records}),
    }


def name_of(setting: Setting | None) -> str:
    if setting is None:
        return ONE_JOB
    every, after = setting
    name = "replicas, each step" if every == 1 else f"replicas, once in {every} steps"
    return f"{name} after {after}" if after else name


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train all runs. Raises LaunchError if one fails."""
    dataset = prepare_data.prepare(options.data, options.data_cache, options.max_bytes)
    settings = [*([None] if options.sites is None else []), *options.settings.values()]
    pairs = [(setting, seed) for seed in range(1, options.seeds + 1) for setting in settings]
    runs: dict[str, list[Run]] = {name_of(setting): [] for setting in settings}
    options.out.mkdir(parents=True, exist_ok=True)

    def train_one(setting: Setting | None, seed: int) -> Run:
        chosen = alone(options) if setting is None and options.alone else options
        run = train(chosen, dataset.prefix, setting, seed)
        # The results of finished runs are kept even if a later run fails.
        name = f"{name_of(setting)}, seed {seed}"
        (options.out / f"{name}.json").write_text(json.dumps(run) + os.linesep)
        print(f"{name}: {loss(run):.4f} in {run['ends_s'][-1]:.0f} s", flush=True)
        return run

    with ThreadPoolExecutor(options.at_once) as pool:
        made = pool.map(lambda pair: train_one(*pair), pairs)
        for (setting, _), run in zip(pairs, made, strict=True):
            runs[name_of(setting)].append(run)
    return {"schema": SCHEMA, "meta": metadata(sys.argv[1:]), "runs": runs}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        result = gpt.result_of(options, measure, "replicas.json")
    except LaunchError as error:
        print(f"bench/replicas/run.py: {error}", file=sys.stderr)
        return 1
    print(aligned(rows(result["runs"])))
    if options.plot:
        draw(result["runs"], options.plot)
    names = {text: name_of(setting) for text, setting in options.settings.items()}
    wrong = problems(result["runs"], names, options.at_most, options.at_most_slower)
    print("\n".join(wrong) or "# no difference is above its limit")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
