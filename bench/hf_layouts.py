#!/usr/bin/env python3
"""Trains tiny Hugging Face models in every layout, whole and by LoRA adapters.

Each cell trains a few steps on this machine's CPU through BytePS and through all-reduce, and looks
at the files that come out.
docs/results/huggingface.md says what must come out, and holds the table that --markdown writes.

Exit status: 0 all is as it must be; 1 a miss, or a rank failed, whose log is shown; 2 bad usage.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "Megatron-LM"
sys.path[:0] = [str(TREE), *(str(ROOT / name) for name in ("bench", "scripts", "integrations/hf"))]

from benchkit.cells import parse, put_cells  # noqa: E402
from hfkit.layouts import by_name  # noqa: E402
from hfkit.runs import PROGRAMS, Outcome, compare  # noqa: E402
from paritykit.data import data_arguments, tiny_dataset  # noqa: E402
from paritykit.forked import JobFailed, start_fork_server  # noqa: E402
from progress import Progress  # noqa: E402

BEGIN = "<!-- made by `make hf-layouts MARKDOWN=docs/results/huggingface.md`; not to be edited by hand -->"
HEAD = [
    "| layout | model | trained | HF → Megatron → HF | BytePS and all-reduce | transformers | "
    "peft | sent, of what ranks share |",
    "|---|---|---|---|---|---:|---:|---:|",
]


def row(name: str, model: str, outcome: Outcome, *, lora: bool) -> str:
    """A line of the table."""
    same = {True: "the same bits", False: "**different**"}
    part = f"adapters, {outcome.trained:.0%}" if lora else "all"
    by_peft = "" if outcome.adapter_logits is None else f"{outcome.adapter_logits:.0e}"
    cells = [name, model, part, same[outcome.round_trip], same[outcome.equal]]
    cells += [f"{outcome.logits:.0e}", by_peft, f"{outcome.pushed:.2f}"]
    return f"| {' | '.join(cells)} |"


def put(markdown: Path, lines: Sequence[str]) -> None:
    """Write these lines of the table into the document."""
    put_cells(
        markdown,
        lines,
        begin=BEGIN,
        head=HEAD,
        known=[(layout.name, lora) for layout in by_name([]) for lora in (False, True)],
        key_of=lambda columns: (columns[0], columns[2].startswith("adapters")),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    layouts, markdown = parse(__doc__, by_name, arguments)
    start_fork_server([PROGRAMS])
    cells = [(layout, lora) for layout in layouts for lora in (False, True)]
    lines: list[str] = []
    good = True
    with (
        tempfile.TemporaryDirectory(prefix="hf-layouts-") as scratch,
        Progress("layouts", total=len(cells)) as bar,
    ):
        folder = Path(scratch)
        data = data_arguments(tiny_dataset(folder))
        for done, (layout, lora) in enumerate(cells):
            way = "lora" if lora else "full"
            bar.update(f"{layout.name}, {way}", done=done)
            try:
                outcome = compare(
                    layout, folder / f"{layout.name}-{way}", folder / "models", data, lora=lora
                )
            except JobFailed as error:
                print(f"{layout.name}, {way}: {error}", file=sys.stderr)
                good = False
                continue
            lines.append(row(layout.name, layout.model, outcome, lora=lora))
            bar.say(lines[-1], stream=sys.stdout)
            for problem in outcome.problems():
                print(f"{layout.name}, {way}: {problem}", file=sys.stderr)
                good = False
            if markdown is not None:
                put(markdown, lines)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
