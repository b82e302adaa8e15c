#!/usr/bin/env python3
"""Trains verl's actor and critic in every layout, by GRPO and by PPO.

Each cell trains a few steps through BytePS and through all-reduce, and hands the weights to the
rollout after each: on this machine's CPU, or (--device cuda) on its GPUs, which ranks share where
there are too few. docs/results/rl.md says what must come out, and holds the tables that --markdown writes.

Exit status: 0 all is as it must be; 1 a miss, or a rank failed, whose log is shown; 2 bad usage.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "Megatron-LM"
FOLDERS = ("bench", "scripts", "integrations/hf", "integrations/rl")
sys.path[:0] = [str(TREE), *(str(ROOT / name) for name in FOLDERS)]

from benchkit.cells import (  # noqa: E402
    add_device_options,
    machine_of,
    parse_device_options,
    parser_of,
    put_cells,
)
from megatron_byteps_rl.devices import ENVIRONMENTS, check  # noqa: E402
from paritykit.forked import JobFailed, start_fork_server  # noqa: E402
from paritykit.platforms import CUDA, PLATFORMS, Platform  # noqa: E402
from progress import Progress  # noqa: E402
from rlkit.layouts import Layout, by_name  # noqa: E402
from rlkit.runs import PROGRAMS, Outcome, compare, large_model  # noqa: E402

ALGORITHMS = ("grpo", "ppo")
BEGIN = {
    "cpu": "<!-- made by `make rl-layouts MARKDOWN=docs/results/rl.md`; not to be edited by hand -->",
    "cuda": "<!-- made by `bench/rl_layouts.py --device cuda --markdown docs/results/rl.md` -->",
}
PHASES = ("generation", "reward", "critic update", "actor update", "weights to the rollout")
"""Whose peak memory the table for GPUs shows."""


def head(device: str) -> list[str]:
    """The table's first two lines."""
    names = (
        "| layout of training | layout of the rollout | algorithm | samples a prompt | actor | "
        "critic | reward | sums a step | rollout and training | KiB sent in a reshard |"
    )
    rule = "|---|---|---|---:|---|---|---:|---:|---:|---:|"
    if device == "cuda":
        names += "".join(f" MiB, {phase} |" for phase in PHASES)
        rule += "---:|" * len(PHASES)
    return [names, rule]


def row(layout: Layout, algorithm: str, outcome: Outcome) -> str:
    """A line of the table."""
    same = {True: "the same bits", False: "**different**", None: "none"}
    roles = [same[outcome.equal.get(role)] for role in ("actor", "critic")]
    reward = "rule" if outcome.rewards_apart is None else f"{outcome.rewards_apart:.3f}"
    sums = f"{sum(outcome.sums.values())}"
    sent = "" if outcome.sent_bytes is None else f"{outcome.sent_bytes / 1024:,.0f}"
    cells = [layout.training, layout.rollout, algorithm.upper(), f"{layout.samples}", *roles]
    cells += [reward, sums, f"{outcome.apart:.3f}", sent]
    if outcome.peaks:
        taken = [outcome.peaks.get(phase) for phase in PHASES]
        cells += ["" if peak is None else f"{peak / (1 << 20):,.1f}" for peak in taken]
    return f"| {' | '.join(cells)} |"


def put(markdown: Path, lines: Sequence[str], device: str) -> None:
    """Write these lines of the device's table into the document."""
    put_cells(
        markdown,
        lines,
        begin=BEGIN[device],
        head=head(device),
        known=[
            (layout.training, layout.rollout, a.upper())
            for layout in by_name([])
            for a in ALGORITHMS
        ],
        key_of=lambda columns: tuple(columns[:3]),
        machine=machine_of(device),
    )


def run(
    layouts: Sequence[Layout],
    platform: Platform,
    *,
    jobs: int,
    budget: float | None,
    markdown: Path | None,
) -> bool:
    """Run these layouts by each algorithm; whether all is as it must be. See the options."""
    deadline = math.inf if budget is None else time.monotonic() + budget
    cells = [(layout, algorithm) for layout in layouts for algorithm in ALGORITHMS]
    lines: list[str] = []
    left: list[str] = []
    good = True
    with (
        tempfile.TemporaryDirectory(prefix="rl-layouts-") as scratch,
        Progress("rl-layouts", total=len(cells), unit="cells") as bar,
        ThreadPoolExecutor(max_workers=jobs) as pool,
    ):
        bar.update("the base model is taught; torch, Megatron and verl are imported")
        start_fork_server([PROGRAMS], platform)
        from megatron_byteps_rl import task

        folder = Path(scratch)
        model = task.make_model(folder / "base")
        if platform is CUDA:  # to see what each phase takes of its memory
            model = large_model(model, folder / "large")
        from rlkit import rewards

        reward = rewards.write(model, folder / "reward")

        def one(number: int) -> Outcome | None:
            if time.monotonic() > deadline:
                return None
            layout, algorithm = cells[number]
            place = folder / str(number)
            return compare(place, layout, algorithm, model, reward, platform, first_gpu=number)

        print("\n".join(head(platform.name)), flush=True)
        running = [pool.submit(one, number) for number in range(len(cells))]
        for number, (layout, algorithm) in enumerate(cells):
            title = f"{layout.name} {algorithm}"
            bar.update(title, done=number)
            try:
                outcome = running[number].result()
            except (JobFailed, AssertionError) as error:
                bar.say(f"{title}: {error}")
                good = False
                continue
            if outcome is None:
                left.append(title)
                continue
            good = good and outcome.good
            lines.append(row(layout, algorithm, outcome))
            bar.say(lines[-1], stream=sys.stdout)
            if markdown is not None:
                put(markdown, lines, platform.name)
        if left:
            bar.say(f"not run, since --budget is used up: {'; '.join(left)}")
    return good and not left


def parse(arguments: Sequence[str] | None) -> tuple[list[Layout], argparse.Namespace]:
    parser = parser_of(__doc__)
    add_device_options(parser)
    options = parse_device_options(parser, arguments)
    try:
        layouts = by_name(options.layout)
        check(options.device, 1)
    except ValueError as error:
        parser.error(str(error))
    return layouts, options


def main(arguments: Sequence[str] | None = None) -> int:
    layouts, options = parse(arguments)
    # Before verl is imported, here or in the fork server.
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.update({**ENVIRONMENTS[options.device], **own})
    good = run(
        layouts,
        PLATFORMS[options.device],
        jobs=options.jobs,
        budget=options.budget,
        markdown=options.markdown,
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
