#!/usr/bin/env python3
"""Shows that training through BytePS gives the gradients that all-reduce gives.

Trains each layout of a table (data, tensor, context, pipeline and expert parallelism, distributed
optimizer, overlap, accumulation, element types) from one seed through torch.distributed and through
BytePS, on this machine's CPU or (--device cuda) each rank on a GPU of its own, and compares every
gradient bucket and the loss of every step on every rank.
docs/results/correctness.md says what is required of them, and holds the tables that --markdown
writes; with --device cuda it writes a page about the machine.

Exit status: 0 all is as it must be; 1 a miss, or a rank failed, whose log is shown; 2 bad usage.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

# No more than these: every rank imports this file.
from tests.layouts.gpt.rows import LAYOUTS

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "Megatron-LM"


def main(arguments: Sequence[str] | None = None) -> int:
    from tests.layouts.gpt import runs
    from tests.layouts.gpt.layout import Report
    from tests.layouts.job import PLATFORMS
    from tests.layouts.table import machine_of, parse, parser_of

    parser = parser_of(__doc__)
    parser.add_argument("--list", action="store_true", help="show the layouts and stop")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave logs and records there")
    layouts, options = parse(parser, LAYOUTS, arguments)
    if options.list:
        print(runs.listing(layouts))
        return 0
    if not (TREE / "pretrain_dpu_gpt.py").is_file():
        print(f"parity.py: {TREE} is not assembled: run `make setup`", file=sys.stderr)
        return 1

    def put(report: Report) -> None:
        if options.markdown is not None and options.device == "cpu":
            runs.put(options.markdown, report)

    platform = PLATFORMS[options.device]
    good, reports = runs.run_layouts("parity", layouts, platform, options, put)
    if options.markdown is not None and options.device == "cuda":
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(runs.page(machine_of("cuda"), reports), encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
