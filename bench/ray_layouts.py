#!/usr/bin/env python3
"""Trains in every layout twice: by ranks as torchrun starts them, and by ranks under Ray.

Each cell trains a few steps, a small GPT or LoRA adapters on a small Hugging Face model: on this
machine's CPU, or (--device cuda) on its GPUs, which ranks share where there are too few. All cells
share one Ray cluster, and its actors. docs/results/ray.md says what must come out, and holds the tables
that --markdown writes.

Exit status: 0 all is as it must be; 1 a miss, or a rank failed, whose log is shown; 2 bad usage.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "Megatron-LM"
FOLDERS = ("bench", "scripts", "integrations/hf", "integrations/ray")
sys.path[:0] = [str(TREE), *(str(ROOT / name) for name in FOLDERS)]

# Nothing more: each local rank imports this file.
from raykit.layouts import CELLS, Cell, by_name  # noqa: E402

if TYPE_CHECKING:
    from paritykit.platforms import Platform
    from raykit.modes import Outcome

BEGIN = {
    "cpu": "<!-- made by `make ray-layouts MARKDOWN=docs/results/ray.md`; not to be edited by hand -->",
    "cuda": "<!-- made by `bench/ray_layouts.py --device cuda --markdown docs/results/ray.md` -->",
}
HEAD = [
    "| layout | trained | ranks | groups | sums a step | loss, local | loss, Ray | losses, sums, "
    "parameters |",
    "|---|---|---:|---:|---:|---:|---:|---|",
]


def row(cell: Cell, outcome: Outcome) -> str:
    """A line of the table."""
    same = "**different**" if outcome.differences else "the same bits"
    cells = [cell.layout, cell.trained, str(cell.ranks), str(outcome.groups), str(outcome.sums)]
    return f"| {' | '.join([*cells, repr(outcome.local_loss), repr(outcome.ray_loss), same])} |"


def put(markdown: Path, lines: Sequence[str], platform: Platform) -> None:
    """Write these lines of the platform's table into the document."""
    from benchkit.cells import machine_of, put_cells

    put_cells(
        markdown,
        lines,
        begin=BEGIN[platform.name],
        head=HEAD,
        known=[(cell.layout, cell.trained) for cell in CELLS],
        key_of=lambda columns: (columns[0], columns[1]),
        machine=machine_of(platform.name),
    )


def run(
    cells: Sequence[Cell],
    platform: Platform,
    *,
    jobs: int,
    budget: float | None,
    markdown: Path | None,
) -> bool:
    """Run these cells; whether all is as it must be. See the options."""
    from megatron_byteps_ray.cluster import cluster
    from megatron_byteps_ray.pool import JobError, Pool
    from paritykit.data import data_arguments, tiny_dataset
    from paritykit.forked import JobFailed, start_fork_server
    from progress import Progress
    from raykit.gpus import gpus_to_offer
    from raykit.modes import arguments_of, compare, run_locally, run_under_ray, settings_of_pool

    deadline = math.inf if budget is None else time.monotonic() + budget
    lines: list[str] = []
    good = True
    with (
        # Ray's sockets need a short path, whatever TMPDIR is.
        tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp") as scratch,
        Progress("ray-layouts", total=len(cells), unit="cells") as bar,
        ThreadPoolExecutor(max_workers=jobs) as local_runs,
    ):
        folder = Path(scratch)
        ranks = max(cell.ranks for cell in cells)
        settings = settings_of_pool(folder / "pool", ranks, platform)
        bar.update("torch, Megatron and its bridge are imported, once for either mode")
        start_fork_server(["hfkit.rank"], platform)
        data = data_arguments(tiny_dataset(folder))
        models = folder / "models"
        with cluster(settings, temp_dir=f"{scratch}/ray", gpus=gpus_to_offer(settings)):
            pool = Pool(settings)
            try:
                pool.open()
                wanted = [arguments_of(cell, data, models) for cell in cells]
                places = [folder / f"{cell.layout}-{cell.trained}" for cell in cells]
                local = [
                    local_runs.submit(run_locally, cell, place / "local", arguments, platform)
                    for cell, place, arguments in zip(cells, places, wanted, strict=True)
                ]
                if not pool.wait_warm(ranks, settings.limits.warm):
                    raise JobError("the pool's actors do not become warm")
                for done, cell in enumerate(cells):
                    title = f"{cell.layout}, {cell.trained}"
                    bar.update(title, done=done)
                    if time.monotonic() > deadline:
                        left = [f"{cell.layout}, {cell.trained}" for cell in cells[done:]]
                        bar.say(f"not run, since --budget is used up: {'; '.join(left)}")
                        good = False
                        break
                    try:
                        place = places[done] / "ray"
                        ray = run_under_ray(cell, place, wanted[done], pool, settings)
                        outcome = compare(local[done].result(), ray)
                    except (JobError, JobFailed) as error:
                        bar.say(f"{title}: {error}")
                        good = False
                        continue
                    lines.append(row(cell, outcome))
                    bar.say(lines[-1], stream=sys.stdout)
                    for problem in [*outcome.differences, *outcome.problems]:
                        bar.say(f"{title}: {problem}")
                    good = good and outcome.good
                    if markdown is not None:
                        put(markdown, lines, platform)
            finally:
                local_runs.shutdown(wait=False, cancel_futures=True)
                pool.close()
    return good


def parse(arguments: Sequence[str] | None) -> tuple[list[Cell], argparse.Namespace]:
    from benchkit.cells import add_device_options, parse_device_options, parser_of

    parser = parser_of(__doc__)
    add_device_options(parser)
    options = parse_device_options(parser, arguments)
    try:
        cells = by_name(options.layout)
    except ValueError as error:
        parser.error(str(error))
    return cells, options


def main(arguments: Sequence[str] | None = None) -> int:
    from paritykit.platforms import PLATFORMS

    cells, options = parse(arguments)
    platform = PLATFORMS[options.device]
    good = run(
        cells,
        platform,
        jobs=options.jobs,
        budget=options.budget,
        markdown=options.markdown,
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
