#!/usr/bin/env python3
"""Reports the cost of every wire type in held-out loss, from the results of bench/learning/run.py.

A seed fixes initial parameters and data order, so only runs of the same seed are compared. The
interval is Student's t, over seeds.

  bench/learning/report.py [--at-most int8=0.003,int4-int8-servers=0.006]
  bench/learning/report.py --add build/learning/runs     keep these runs in results.jsonl, too

Exit status: 0 success; 1 an interval ends above its limit; 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.kit import gpt
from bench.learning.wires import RECIPES

REFERENCE = "bf16"
KEPT = Path(__file__).with_name("results.jsonl")
"""Finished runs of all machines, one per line. Runs from several sessions add up here."""
ALIKE = ("size", "schedule", "parameters", "train_sequences")
"""Entries of a result that compared runs must share."""
HEAD = (
    "wire", "optimizer", "seeds", "held-out loss, nats per token, by seed", f"over {REFERENCE}",
    "95 % interval",
)  # fmt: skip


Results = dict[str, dict[int, dict[str, Any]]]
"""Results by wire type (a name in RECIPES), then by seed."""


def saved_results(path: Path = KEPT) -> Results:
    """Read the results that the project keeps in its repository.

    Raises:
        ValueError: the runs have different models, schedules or texts.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return sorted_out([json.loads(line) for line in lines])


def sorted_out(runs: Sequence[dict[str, Any]]) -> Results:
    """Group results by wire type, then by seed.

    Raises:
        ValueError: the runs have different models, schedules or texts.
    """
    results: Results = {}
    for run in runs:
        first = runs[0]
        for name in ALIKE:
            if run[name] != first[name]:
                pair = f"{run['wire']}-{run['seed']} and {first['wire']}-{first['seed']}"
                raise ValueError(f"{pair} differ in {name}: {run[name]} and {first[name]}")
        results.setdefault(run["wire"], {})[run["seed"]] = run
    return results


def add(folders: Sequence[Path]) -> None:
    """Add the results in run.py's folders to `KEPT`. They replace equal runs."""
    runs = [run for seeds in saved_results().values() for run in seeds.values()]
    for folder in folders:
        for path in folder.glob("*-[0-9]*.json"):
            runs.append(json.loads(path.read_text(encoding="utf-8")))
    results = sorted_out(runs)
    ordered = [results[wire][seed] for wire in sorted(results) for seed in sorted(results[wire])]
    KEPT.write_text("".join(json.dumps(run) + "\n" for run in ordered), encoding="utf-8")


def differences(results: Results, wire: str) -> list[float]:
    """Return, for each common seed, the relative difference to the reference."""
    theirs = results.get(REFERENCE, {})
    seeds = sorted(set(results[wire]) & set(theirs))
    return [results[wire][s]["held_out"] / theirs[s]["held_out"] - 1 for s in seeds]


def table(results: Results) -> list[str]:
    """Return the table as lines of Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "| " + " | ".join("---" for _ in HEAD) + " |"]
    for wire, recipe in RECIPES.items():
        if wire not in results:
            continue
        runs = results[wire]
        where = "servers" if recipe.servers else "shards" if recipe.gathers else "hosts"
        name = wire.removesuffix("-servers") + ("" if recipe.is_product else " (experiment)")
        losses = " ".join(f"{runs[seed]['held_out']:.4f}" for seed in sorted(runs))
        mean = statistics.fmean(run["held_out"] for run in runs.values())
        cells = [name, where, str(len(runs)), f"{mean:.4f}: {losses}", "", ""]
        if wire != REFERENCE and (apart := differences(results, wire)):
            mean, low, high = gpt.interval(apart)
            cells[4] = f"{mean:+.2%}"
            cells[5] = f"{low:+.2%}..{high:+.2%}" if len(apart) > 1 else ""
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def problems(results: Results, at_most: dict[str, float]) -> list[str]:
    """Return descriptions of intervals that end above their limits, or that are unknown."""
    wrong = []
    for wire, limit in at_most.items():
        apart = differences(results, wire) if wire in results else []
        if len(apart) < 2:
            wrong.append(f"{wire}: {len(apart)} seeds in common with {REFERENCE}, need 2")
        elif (high := gpt.interval(apart)[2]) > limit:
            wrong.append(f"{wire}: the interval ends at {high:+.2%}, above {limit:+.2%}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--add", type=Path, nargs="+", default=[], metavar="FOLDER", help="keep its results"
    )
    parser.add_argument(
        "--at-most", default="", metavar="WIRE=X,...", help="fail where an interval ends above X"
    )
    options = parser.parse_args(arguments)
    try:
        at_most = gpt.limits(options.at_most, str)
    except ValueError:
        parser.error("--at-most is written like int8=0.003,int4-int8-servers=0.006")
    try:
        add(options.add)
        results = saved_results()
    except ValueError as error:
        parser.error(str(error))
    first = next(iter(next(iter(results.values()), {}).values()), None)
    if first is None:
        parser.error(f"there is no result in {KEPT.name}: bench/learning/run.py makes some")
    print(f"# {first['parameters']:,} parameters, {first['device']}; {first['size']}")
    print(f"# {first['schedule']}")
    print("\n".join(table(results)))
    wrong = problems(results, at_most)
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
