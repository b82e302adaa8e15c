#!/usr/bin/env python3
"""Compares the loss of a GPT whose gradients travel in fewer bits with the reference.

Trains a model on text with several wire types and the same seeds. A seed fixes initial parameters
and data order, so losses of the same seed are compared step by step. Prints the mean relative
difference over the last steps, with a 95 % interval over seeds (for a single seed: over steps).

  bench/quality/run.py                                 a small GPT on this machine
  bench/quality/run.py --layers 18 --hidden 768 --steps 1000 --seeds 3 --at-once 9 -- --bf16
  bench/quality/run.py --from-json RESULT --plot CURVES.png

Exit status: 0 success; 1 a run failed, or a difference is above its limit; 2 bad usage.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.kit import gpt
from bench.kit.record import metadata
from scripts import children, prepare_data
from scripts import train as train_script
from scripts.progress import aligned
from scripts.trainkit.job import Job, JobError, Record

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = 1
TYPES = ("same", "bf16", "int8", "int4")
REFERENCE = "bf16"
LAST = 100
"""Number of last steps whose losses are compared."""
HEAD = ("wire type", "seeds", f"loss, last {LAST} steps", f"over {REFERENCE}'s", "95 % interval")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    positive = train_script.positive
    add = parser.add_argument
    add("--types", default="bf16,int8,int4", help=f"of {', '.join(TYPES)} (default: %(default)s)")
    add("--seeds", type=positive, default=3, help="default: 3")
    add("--workers", type=positive, default=2, help="of each run (default: 2)")
    add("--servers", type=positive, default=1, help="of each run (default: 1)")
    add("--batch", type=positive, default=8, help="sequences per rank and step (default: 8)")
    gpt.add_model(add)
    add("--at-once", type=positive, default=1, help="runs that share this machine (default: 1)")
    add("--at-most", default="", metavar="TYPE=X,...", help="fail where a difference is above X")
    gpt.add_files(add, "quality")
    options = parser.parse_args(arguments)
    options.types = options.types.split(",")
    unknown = set(options.types) - set(TYPES)
    if unknown or REFERENCE not in options.types:
        parser.error(f"--types: some of {', '.join(TYPES)}, and {REFERENCE} among them")
    try:
        options.at_most = gpt.limits(options.at_most, str)
    except ValueError:
        parser.error("--at-most is written like int8=0.002,int4=0.007")
    return options


def learn(
    options: argparse.Namespace, prefix: Path, wire: str, seed: int, number: int
) -> list[float]:
    """Train and return the loss of every step. `number` selects the GPU: runs with different
    numbers use different GPUs as long as there are enough."""
    arguments = gpt.megatron_arguments(options, prefix, seed)
    arguments += ["--use-dpu-reduce", "--dpu-reduce-backend", "flat"]
    if wire != "same":
        arguments += ["--dpu-reduce-wire-dtype", wire]
    environment = train_script.environment(options.workers, options.servers)
    if train_script.on_gpu():
        shown = min(options.workers, children.count_gpus())
        environment["CUDA_VISIBLE_DEVICES"] = children.some_gpus(number * shown, shown)
    job = Job(
        tree=options.tree,
        folder=options.out / f"{wire}-{seed}",
        workers=options.workers,
        arguments=arguments,
        environment=environment,
    )
    shown = {"at": 0.0}

    def show(record: Record) -> None:
        if record.steps and time.monotonic() - shown["at"] > 20:
            shown["at"] = time.monotonic()
            last = record.steps[-1]
            print(f"{wire}, seed {seed}: step {last.iteration}, {last.loss:.4f}", flush=True)

    return [step.loss for step in job.run(show).steps]


def differences(losses: dict[str, list[list[float]]], wire: str) -> list[float]:
    """Return relative differences to the reference: one per seed, or for a single seed one per last
    step."""
    pairs = zip(losses[wire], losses[REFERENCE], strict=True)
    steps = [[(a - b) / b for a, b in zip(x[-LAST:], y[-LAST:], strict=True)] for x, y in pairs]
    return steps[0] if len(steps) == 1 else [statistics.fmean(one) for one in steps]


def rows(losses: dict[str, list[list[float]]]) -> list[Sequence[str]]:
    """Return the table."""
    table: list[Sequence[str]] = [HEAD]
    for wire, runs in losses.items():
        loss = statistics.fmean(value for run in runs for value in run[-LAST:])
        cells = [wire, str(len(runs)), f"{loss:.4f}"]
        if wire != REFERENCE:
            mean, low, high = gpt.interval(differences(losses, wire))
            cells += [f"{mean:+.3%}", f"{low:+.3%}..{high:+.3%}"]
        table.append([*cells, *[""] * (len(HEAD) - len(cells))])
    return table


def problems(losses: dict[str, list[list[float]]], at_most: dict[str, float]) -> list[str]:
    """Return descriptions of differences above their limits."""
    found = []
    for wire, limit in at_most.items():
        mean, _, _ = gpt.interval(differences(losses, wire))
        if not mean <= limit:
            found.append(
                f"{wire}: the loss is {mean:+.3%} above {REFERENCE}'s, more than {limit:.2%}"
            )
    return found


def draw(losses: dict[str, list[list[float]]], path: Path) -> None:
    """Draw the losses, and their differences to the reference."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for number, (wire, runs) in enumerate(losses.items()):
        mean = [statistics.fmean(step) for step in zip(*runs, strict=True)]
        above.plot(gpt.smooth(mean), label=wire, color=f"C{number}", linewidth=1.2)
        if wire != REFERENCE:
            theirs = [statistics.fmean(step) for step in zip(*losses[REFERENCE], strict=True)]
            apart = [100 * (a - b) / b for a, b in zip(mean, theirs, strict=True)]
            below.plot(gpt.smooth(apart), label=wire, color=f"C{number}", linewidth=1.0)
    above.set_ylabel("loss per byte, mean of seeds")
    below.set_ylabel(f"% above {REFERENCE}'s")
    below.set_xlabel("step; each point is the mean of 20")
    below.axhline(0, color="black", linewidth=0.5)
    above.legend()
    below.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train all. Raises JobError if a run fails."""
    dataset = prepare_data.prepare(options.data, options.data_cache, options.max_bytes)
    asked = [(wire, seed) for seed in range(1, options.seeds + 1) for wire in options.types]
    losses: dict[str, list[list[float]]] = {wire: [] for wire in options.types}
    with ThreadPoolExecutor(options.at_once) as pool:
        learned = pool.map(
            lambda number: learn(options, dataset.prefix, *asked[number], number),
            range(len(asked)),
        )
        for (wire, _), run in zip(asked, learned, strict=True):
            losses[wire].append(run)
    return {"schema": SCHEMA, "meta": metadata(sys.argv[1:]), "losses": losses}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        result = gpt.result_of(options, measure, "quality.json")
    except JobError as error:
        print(f"bench/quality/run.py: {error}", file=sys.stderr)
        return 1
    print(aligned(rows(result["losses"])))
    if options.plot:
        draw(result["losses"], options.plot)
    wrong = problems(result["losses"], options.at_most)
    print("\n".join(wrong) or "# no difference is above its limit")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
