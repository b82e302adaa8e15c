#!/usr/bin/env python3
"""Trains tiny Hugging Face models in every layout, fully and by LoRA adapters.

Each cell trains a few steps on this machine's CPU, through BytePS and through all-reduce, and
checks the written files. docs/results/integrations.md describes the checks, and has the table that
--markdown writes.

Exit status: 0 success; 1 a failed check, or a failed rank, whose log is shown; 2 bad usage.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.layouts.hugging_face.runs import KINDS, LAYOUTS, PROGRAMS, Layout, Outcome, compare
from tests.layouts.job import data_arguments, start_fork_server, tiny_dataset
from tests.layouts.table import Table, parse, parser_of, run_table

MADE_BY = "`make hf-layouts MARKDOWN=docs/results/integrations.md`; not to be edited by hand"
CELLS = [(layout, lora) for layout in LAYOUTS for lora in (False, True)]
CELLS += [(layout, True) for layout in KINDS]
TABLE = Table(
    begin=f"<!-- made by {MADE_BY} -->",
    head=(
        *("layout", "model", "trained", "same bits"),
        *("transformers", "peft", "sent"),
    ),
    align="llllrrr",
    keys=[(layout.name, lora) for layout, lora in CELLS],
    key_of=lambda cells: (cells[0], cells[2].startswith("adapters")),
)


def row(layout: Layout, outcome: Outcome, *, lora: bool) -> list[str]:
    part = f"adapters, {outcome.trained:.0%}" if lora else "all"
    by_peft = "" if outcome.adapter_logits is None else f"{outcome.adapter_logits:.0e}"
    same = "yes" if outcome.round_trip and outcome.equal else "**no**"
    how_far = [f"{outcome.logits:.0e}", by_peft, f"{outcome.pushed:.2f}"]
    return [layout.name, layout.model, part, same, *how_far]


def title(cell: tuple[Layout, bool]) -> str:
    """Make a title of the layout and the kind of training."""
    return f"{cell[0].name}, {'lora' if cell[1] else 'full'}"


def main(arguments: Sequence[str] | None = None) -> int:
    layouts, options = parse(parser_of(__doc__, devices=False), [*LAYOUTS, *KINDS], arguments)
    start_fork_server([PROGRAMS])
    cells = [cell for cell in CELLS if cell[0] in layouts]
    with tempfile.TemporaryDirectory(prefix="hf-layouts-") as scratch:
        folder = Path(scratch)
        data = data_arguments(tiny_dataset(folder))

        def run(cell: tuple[Layout, bool]) -> Outcome:
            layout, lora = cell
            directory = folder / f"{layout.name}-{'lora' if lora else 'full'}"
            return compare(layout, directory, folder / "models", data, lora=lora)

        return run_table(
            "hf-layouts",
            cells,
            options,
            TABLE,
            run=run,
            row=lambda cell, outcome: row(cell[0], outcome, lora=cell[1]),
            problems=lambda _, outcome: outcome.problems(),
            title=title,
        )


if __name__ == "__main__":
    sys.exit(main())
