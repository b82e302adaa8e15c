#!/usr/bin/env python3
"""Shows what every wire costs in held-out loss, from the results of bench/learning/run.py.

A seed fixes the parameters at the beginning and the order of the data; runs of one seed are
compared. The interval is Student's, over seeds.

  bench/learning/report.py build/learning/runs [--at-most int8=0.003,int4-int8-servers=0.006]

Exit status: 0 all is well; 1 an interval ends above its limit; 2 bad usage.
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
HEAD = (
    "wire", "optimizer", "seeds", "held-out loss, nats per token, by seed", f"over {REFERENCE}",
    "95 % interval",
)  # fmt: skip


def results(folders: Sequence[Path]) -> dict[str, dict[int, dict[str, Any]]]:
    """By wire and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*-[0-9]*.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            found.setdefault(result["wire"], {})[result["seed"]] = result
    return found


def differences(found: dict[str, dict[int, dict[str, Any]]], wire: str) -> list[float]:
    """Relative to the reference, of each seed that both have."""
    theirs = found.get(REFERENCE, {})
    seeds = sorted(set(found[wire]) & set(theirs))
    return [found[wire][s]["held_out"] / theirs[s]["held_out"] - 1 for s in seeds]


def table(found: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """Lines of Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "| " + " | ".join("---" for _ in HEAD) + " |"]
    for wire, recipe in RECIPES.items():
        if wire not in found:
            continue
        runs = found[wire]
        where = "servers" if recipe.servers else "hosts"
        name = wire.removesuffix("-servers") + ("" if recipe.is_product else " (experiment)")
        losses = " ".join(f"{runs[seed]['held_out']:.4f}" for seed in sorted(runs))
        mean = statistics.fmean(run["held_out"] for run in runs.values())
        cells = [name, where, str(len(runs)), f"{mean:.4f}: {losses}", "", ""]
        if wire != REFERENCE and (apart := differences(found, wire)):
            mean, low, high = gpt.interval(apart)
            cells[4] = f"{mean:+.2%}"
            cells[5] = f"{low:+.2%}..{high:+.2%}" if len(apart) > 1 else ""
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def problems(found: dict[str, dict[int, dict[str, Any]]], at_most: dict[str, float]) -> list[str]:
    """Intervals that end above their limits, and those that are not known."""
    wrong = []
    for wire, limit in at_most.items():
        apart = differences(found, wire) if wire in found else []
        if len(apart) < 2:
            wrong.append(f"{wire}: {len(apart)} seeds that {REFERENCE} has too say nothing")
        elif (high := gpt.interval(apart)[2]) > limit:
            wrong.append(f"{wire}: the interval ends at {high:+.2%}, above {limit:+.2%}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folders", type=Path, nargs="+", help="of results")
    add("--at-most", default="", metavar="WIRE=X,...", help="fail where an interval ends above X")
    options = parser.parse_args(arguments)
    try:
        at_most = gpt.limits(options.at_most, str)
    except ValueError:
        parser.error("--at-most is written like int8=0.003,int4-int8-servers=0.006")
    found = results(options.folders)
    first = next(iter(next(iter(found.values()), {}).values()), None)
    if first is None:
        parser.error("there is no result in these folders")
    print(f"# {first['parameters']:,} parameters, {first['device']}; {first['size']}")
    print(f"# {first['schedule']}")
    print("\n".join(table(found)))
    wrong = problems(found, at_most)
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
