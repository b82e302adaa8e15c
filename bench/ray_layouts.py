#!/usr/bin/env python3
"""Trains in every layout twice: by ranks as torchrun starts them, and by ranks under Ray.

Each cell trains a few steps on this machine's CPU, a small GPT or LoRA adapters on a small Hugging
Face model. All cells share one Ray cluster, and its actors. docs/ray.md says what must come out,
and holds the table that --markdown writes.

Exit status: 0 all is as it must be; 1 a miss, or a rank failed, whose log is shown; 2 bad usage.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "Megatron-LM"
FOLDERS = ("bench", "scripts", "integrations/hf", "integrations/ray")
sys.path[:0] = [str(TREE), *(str(ROOT / name) for name in FOLDERS)]

# Nothing more: each local rank imports this file.
from raykit.layouts import CELLS, Cell, by_name  # noqa: E402

if TYPE_CHECKING:
    from raykit.modes import Outcome

BEGIN = "<!-- made by `make ray-layouts MARKDOWN=docs/ray.md`; not to be edited by hand -->"
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


def put(markdown: Path, lines: Sequence[str]) -> None:
    """Write these lines of the table into the document."""
    from benchkit.cells import put_cells

    put_cells(
        markdown,
        lines,
        begin=BEGIN,
        head=HEAD,
        known=[(cell.layout, cell.trained) for cell in CELLS],
        key_of=lambda columns: (columns[0], columns[1]),
    )


def run(cells: Sequence[Cell], markdown: Path | None) -> bool:
    """Run these cells; whether all is as it must be."""
    from megatron_byteps_ray.cluster import cluster
    from megatron_byteps_ray.pool import JobError, Pool
    from paritykit.data import data_arguments, tiny_dataset
    from paritykit.forked import JobFailed, start_fork_server
    from progress import Progress
    from raykit.modes import run_both, settings_of_pool

    lines: list[str] = []
    good = True
    with (
        # Ray's sockets need a short path, whatever TMPDIR is.
        tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp") as scratch,
        Progress("ray-layouts", total=len(cells), unit="cells") as bar,
    ):
        folder = Path(scratch)
        ranks = max(cell.ranks for cell in cells)
        settings = settings_of_pool(folder / "pool", ranks)
        bar.update("torch, Megatron and its bridge are imported, once for either mode")
        start_fork_server(["hfkit.rank"])
        data = data_arguments(tiny_dataset(folder))
        with cluster(settings, temp_dir=f"{scratch}/ray"):
            pool = Pool(settings)
            try:
                pool.open()
                if not pool.wait_warm(ranks, settings.limits.warm):
                    raise JobError("the pool's actors do not become warm")
                for done, cell in enumerate(cells):
                    title = f"{cell.layout}, {cell.trained}"
                    bar.update(title, done=done)
                    try:
                        outcome = run_both(
                            cell,
                            folder / f"{cell.layout}-{cell.trained}",
                            data=data,
                            models=folder / "models",
                            pool=pool,
                            settings=settings,
                        )
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
                        put(markdown, lines)
            finally:
                pool.close()
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    from benchkit.cells import parse

    cells, markdown = parse(__doc__, by_name, arguments)
    return 0 if run(cells, markdown) else 1


if __name__ == "__main__":
    sys.exit(main())
