#!/usr/bin/env python3
"""Trains every layout twice: by ranks as under torchrun, and by ranks under Ray.

Each cell trains a small GPT, or LoRA adapters on a small Hugging Face model, for a few steps: on
this machine's CPU, or with --device cuda on its GPUs, which ranks share if there are too few. All
cells share a Ray cluster and its actors. docs/results/integrations.md describes the checks, and has
the tables that --markdown writes.

Exit status: 0 success; 1 a failed check, or a failed rank, whose log is shown; 2 bad usage.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

# This is the only import of the project here, because every local rank imports this file.
from tests.layouts.table import Table
from tests.layouts.under_ray.rows import CELLS, Cell

if TYPE_CHECKING:
    from tests.layouts.under_ray.modes import Outcome

MADE_BY = {
    "cpu": "`make ray-layouts MARKDOWN=docs/results/integrations.md`; not to be edited by hand",
    "cuda": "`tests/layouts/ray_layouts.py --device cuda --markdown docs/results/integrations.md`",
}


def table_of(device: str) -> Table:
    return Table(
        begin=f"<!-- made by {MADE_BY[device]} -->",
        head=("layout", "trained", "sums per step", "same bits"),
        align="llrl",
        keys=[(cell.name, cell.trained) for cell in CELLS],
        key_of=lambda cells: (cells[0], cells[1]),
    )


def row(cell: Cell, outcome: Outcome) -> list[str]:
    same = "**no**" if outcome.differences else "yes"
    return [cell.name, cell.trained, str(outcome.sums), same]


def title(cell: Cell) -> str:
    return f"{cell.name}, {cell.trained}"


def main(arguments: Sequence[str] | None = None) -> int:
    from tests.layouts.table import parse, parser_of, run_table

    cells, options = parse(parser_of(__doc__), CELLS, arguments)
    from megatron_byteps_ray.cluster import JobError
    from tests.layouts.job import (
        PLATFORMS,
        JobFailed,
        data_arguments,
        start_fork_server,
        tiny_dataset,
    )
    from tests.layouts.under_ray import modes
    from tests.layouts.under_ray.modes import warm_pool

    platform = PLATFORMS[options.device]
    ranks = max(cell.ranks for cell in cells)
    with (
        tempfile.TemporaryDirectory(prefix="ray-layouts-") as scratch,
        ThreadPoolExecutor(max_workers=options.jobs) as local_runs,
    ):
        folder = Path(scratch)
        settings = modes.settings_of_pool(folder / "pool", ranks, platform)
        start_fork_server(["tests.layouts.hugging_face.rank"], platform)
        data = data_arguments(tiny_dataset(folder))
        wanted = {cell: modes.arguments_of(cell, data, folder / "models") for cell in cells}
        places = {cell: folder / f"{cell.name}-{cell.trained}" for cell in cells}
        with warm_pool(settings) as pool:
            local = {
                cell: local_runs.submit(
                    modes.run_locally, cell, places[cell] / "local", wanted[cell], platform
                )
                for cell in cells
            }

            def run(cell: Cell) -> Outcome:
                there = modes.run_under_ray(
                    cell, places[cell] / "ray", wanted[cell], pool, settings
                )
                return modes.compare(local[cell].result(), there)

            try:
                if not pool.wait_warm(ranks, settings.limits.warm):
                    raise JobError(
                        f"the pool has no {ranks} warm actors after {settings.limits.warm:g} s"
                    )
                return run_table(
                    "ray-layouts",
                    cells,
                    options,
                    table_of(options.device),
                    run=run,
                    row=row,
                    problems=lambda _, outcome: [*outcome.differences, *outcome.problems],
                    title=title,
                    failures=(JobError, JobFailed),
                )
            finally:
                local_runs.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    sys.exit(main())
