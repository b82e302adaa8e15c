#!/usr/bin/env python3
"""Trains verl's actor and critic in every layout, by GRPO and by PPO.

Each cell trains a few steps through BytePS and through all-reduce, and hands the weights to the
rollout after each: on this machine's CPU, or (--device cuda) on its GPUs, which ranks share where
there are too few. docs/results/rl.md says what must come out, and holds the tables that
--markdown writes.

Exit status: 0 all is as it must be; 1 a miss, or a rank failed, whose log is shown; 2 bad usage.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_byteps_rl.devices import ENVIRONMENTS, check
from scripts.progress import Progress
from tests.layouts.command import machine_of, parse, parser_of, run_cells
from tests.layouts.job import JobFailed, start_fork_server
from tests.layouts.platforms import CUDA, PLATFORMS
from tests.layouts.reinforcement.rows import LAYOUTS, Layout
from tests.layouts.reinforcement.runs import PROGRAMS, Outcome, compare, large_model
from tests.layouts.table import Table, line

ALGORITHMS = ("grpo", "ppo")
MADE_BY = {
    "cpu": "`make rl-layouts MARKDOWN=docs/results/rl.md`; not to be edited by hand",
    "cuda": "`tests/layouts/rl_layouts.py --device cuda --markdown docs/results/rl.md`",
}
GENERATION = "generation"
"""The phase whose peak memory the table for GPUs shows, next to the largest of all."""


def table_of(device: str) -> Table:
    """The table of this kind of device."""
    memory = [f"MiB, {GENERATION}", "MiB, at most"] if device == "cuda" else []
    return Table(
        begin=f"<!-- made by {MADE_BY[device]} -->",
        head=(
            *("training", "rollout", "algorithm", "same bits"),
            *("reward", "rollout and training", *memory),
        ),
        align="llllrr" + "r" * len(memory),
        keys=[
            (layout.training, layout.rollout, algorithm.upper())
            for layout in LAYOUTS
            for algorithm in ALGORITHMS
        ],
        key_of=lambda cells: tuple(cells[:3]),
    )


def row(layout: Layout, algorithm: str, outcome: Outcome) -> list[str]:
    """A row of the table."""
    same = "yes" if all(outcome.equal.values()) else "**no**"
    reward = "rule" if outcome.rewards_apart is None else f"{outcome.rewards_apart:.3f}"
    cells = [layout.training, layout.rollout, algorithm.upper(), same, reward]
    cells.append(f"{outcome.apart:.3f}")
    if outcome.peaks:
        taken = [outcome.peaks[GENERATION], max(outcome.peaks.values())]
        cells += [f"{peak / (1 << 20):,.0f}" for peak in taken]
    return cells


def chosen(arguments: Sequence[str] | None) -> tuple[list[Layout], argparse.Namespace]:
    """The layouts of a command line, and its options."""
    parser = parser_of(__doc__)
    layouts, options = parse(parser, LAYOUTS, arguments)
    try:
        check(options.device, 1)
    except ValueError as error:
        parser.error(str(error))
    return layouts, options


def main(arguments: Sequence[str] | None = None) -> int:
    layouts, options = chosen(arguments)
    # Before verl is imported, here or in the fork server.
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.update({**ENVIRONMENTS[options.device], **own})
    platform, table = PLATFORMS[options.device], table_of(options.device)
    cells = [(layout, algorithm) for layout in layouts for algorithm in ALGORITHMS]
    with (
        tempfile.TemporaryDirectory(prefix="rl-layouts-") as scratch,
        Progress("rl-layouts", total=len(cells), unit="cells") as bar,
    ):
        bar.update("the base model is taught; torch, Megatron and verl are imported")
        start_fork_server([PROGRAMS], platform)
        from megatron_byteps_rl import task
        from tests.layouts.reinforcement import rewards

        folder = Path(scratch)
        model = task.make_model(folder / "base")
        if platform is CUDA:  # to see what each phase takes of its memory
            model = large_model(model, folder / "large")
        reward = rewards.write(model, folder / "reward")

        def run(cell: tuple[Layout, str]) -> Outcome:
            number = cells.index(cell)
            place = folder / str(number)
            return compare(place, *cell, model, reward, platform, first_gpu=number)

        def tell(cell: tuple[Layout, str], outcome: Outcome) -> list[str]:
            told = row(*cell, outcome)
            bar.say(line(told), stream=sys.stdout)
            if options.markdown is not None:
                table.put(options.markdown, [told], machine_of(options.device))
            return outcome.problems()

        print("\n".join(table.lines([])), flush=True)
        good = run_cells(
            cells,
            run,
            tell,
            title=lambda cell: f"{cell[0].name} {cell[1]}",
            bar=bar,
            jobs=options.jobs,
            budget=options.budget,
            failures=(JobFailed, AssertionError),
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
