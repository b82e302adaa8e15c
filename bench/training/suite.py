#!/usr/bin/env python3
"""Times whole training steps on several emulated clusters, and checks thresholds.

Each experiment is a run of bench/train_bench.py: a GPT of a billion parameters on 4 or 8 hosts of
1, 2, 4 or 8 GPUs, links of 10 to 100 Gbit/s, through BytePS and by torch.distributed, unsharded and
with the distributed optimizer. It is for a machine of 8 GPUs; hosts that outnumber GPUs share them.
Those named optimizer-... have a smaller model, and the optimizer on the servers as well; of these,
a machine without GPUs runs those with links of 100 Mbit/s and less. The tables come as they are
measured, and one of all experiments comes last, in Markdown.

  bench/training/suite.py                                      all of it, about an hour
  bench/training/suite.py --only 4+4-10gbit 8+8-10gbit         some of it
  bench/training/suite.py --budget 480                         begin nothing new after 480 s
  bench/training/suite.py --only 4+4-10gbit -- --hidden-size 64 --num-layers 2      a smaller model
  bench/training/suite.py --only optimizer-4+4-10gbit          on two GPUs

Exit status: 0 all thresholds are reached; 1 one was missed, a run failed or was not begun; 2 bad
usage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.kit.emulation import EmulationError
from bench.kit.errors import LaunchError
from bench.kit.interrupts import become_interruptible
from bench.kit.record import metadata
from bench.training import run as train_bench
from bench.training.launches import Trained, show_memory
from bench.training.sets import STEPS, Bar, Steps, choose
from scripts import prepare_data
from scripts import train as train_script
from scripts.columns import pipes

ROOT = Path(__file__).resolve().parents[2]

SCHEMA = 1
HEAD = (
    "hosts x GPUs + servers",
    "links",
    "backend",
    "ms per step",
    "min..max",
    "tokens/s",
    "GPU GB",
    "busy",
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = ", ".join(one.name for one in STEPS)
    add("--only", nargs="+", default=[], metavar="NAME", help=f"in this order, of {names}")
    add("--launches", type=int, default=1, help="of each backend, interleaved (default: 1)")
    add("--steps", type=int, default=5, help="of a launch (default: 5)")
    add("--warmup", type=int, default=1, help="of these, not timed (default: 1)")
    add("--timeout", type=float, default=300.0, help="s for a launch, against hangs")
    add("--budget", type=float, metavar="S", help="begin nothing new after so long")
    add("--tree", type=Path, default=ROOT / "build" / "Megatron-LM", help="patched Megatron-LM")
    add("--json", type=Path, metavar="FILE", help="everything, written after each experiment")
    add("megatron", nargs="*", metavar="-- ARGUMENTS", help="for Megatron; they win")
    options = parser.parse_args(arguments)
    options.begun = time.monotonic()
    try:
        options.chosen = choose(options.only, on_gpu=train_script.on_gpu())
    except ValueError as error:
        parser.error(str(error))
    return options


def words_of(steps: Steps, options: argparse.Namespace) -> list[str]:
    """The command line of bench/train_bench.py."""
    own = [
        *("--launches", str(options.launches), "--steps", str(options.steps)),
        *("--warmup", str(options.warmup), "--timeout", str(options.timeout)),
        *("--tree", str(options.tree), "--", *steps.model, *options.megatron),
    ]
    return steps.words(own)


def measure(options: argparse.Namespace) -> Iterator[tuple[Steps, list[Trained], bool]]:
    """Run them one after the other; one that fails does not stop the rest. With each, its launches
    (none: it failed or was not begun) and whether their losses agree."""
    for steps in options.chosen:
        if options.budget is not None and time.monotonic() - options.begun > options.budget:
            print(f"{steps.name}: not begun, since --budget is used up", flush=True)
            yield steps, [], False
            continue
        bench = train_bench.parse(words_of(steps, options))
        try:
            done = train_bench.run(bench)
        except (LaunchError, EmulationError, prepare_data.DataError) as error:
            print(f"{steps.name} FAILED: {error}", flush=True)
            yield steps, [], False
            continue
        print(f"== {steps.name}")
        agreed = train_bench.report(done, bench, words_of(steps, options)) == 0
        sys.stdout.flush()
        yield steps, done, agreed


def rows_of(steps: Steps, done: Sequence[Trained]) -> list[tuple[str, ...]]:
    """A row for each way."""
    rows: list[tuple[str, ...]] = []
    for way in steps.ways:
        mine = [one for one in done if one.backend == way]
        medians = [one.median_s for one in mine]
        each = [step for one in mine for step in one.step_s]
        middle = statistics.median(medians)
        rows.append(
            (
                f"{steps.hosts} x {steps.ranks_per_host} + {steps.hosts}",
                steps.rate.replace("gbit", " Gbit/s"),
                way,
                f"{middle * 1e3:.0f}",
                f"{min(each) * 1e3:.0f}..{max(each) * 1e3:.0f}",
                f"{mine[0].tokens / middle:,.0f}",
                show_memory(mine),
                f"{max(one.busy for one in mine):.0%}",
            )
        )
    return rows


def verdict(steps: Steps, bar: Bar, done: Sequence[Trained]) -> tuple[bool, str]:
    """Whether a threshold is reached, and its line."""
    value, low, high = train_bench.ratio(done, (bar.ours, bar.theirs))
    ok = value >= bar.low
    text = (
        f"{'ok    ' if ok else 'MISSED'} {steps.name}: {bar.ours} over {bar.theirs} "
        f"{value:.3f} ({low:.3f}..{high:.3f}), threshold {bar.low:g}"
    )
    return ok, text


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not (options.tree / "pretrain_dpu_gpt.py").is_file():
        print(f"train_suite.py: {options.tree} is no patched Megatron-LM: run `make setup`")
        return 1
    good = True
    table: list[tuple[str, ...]] = [HEAD]
    verdicts: list[str] = []
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "meta": metadata(sys.argv[1:] if arguments is None else arguments),
        "experiments": {},
    }
    try:
        for steps, done, agreed in measure(options):
            good &= agreed
            if not done:
                continue
            table += rows_of(steps, done)
            judged = [verdict(steps, bar, done) for bar in steps.bars]
            good &= all(ok for ok, _ in judged)
            verdicts += [text for _, text in judged]
            record["experiments"][steps.name] = [vars(one) for one in done]
            if options.json:
                options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except KeyboardInterrupt:
        print("interrupted: what was started has been ended", file=sys.stderr)
        return 130
    print("\n".join(["", *pipes(table), "", *verdicts]))
    return 0 if good else 1


if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
