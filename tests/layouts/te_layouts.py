#!/usr/bin/env python3
"""Shows that models of Transformer Engine's layers get the gradients that all-reduce gives.

Trains each layout of a table from one seed through NCCL and through BytePS, each rank on a GPU of
its own where there are enough, and compares every gradient bucket, loss and norm of every step on
every rank, and the parameters at the end. Needs GPUs with fp8 (Hopper or later), Transformer Engine
and its PyTorch extension. docs/results/correctness.md says what is required, and holds the
tables that --markdown writes.

Exit status: 0 all is as it must be; 1 a miss, or a rank failed, whose log is shown; 2 bad usage.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

# No more than these: every rank imports this file.
from tests.layouts.gpt.te_rows import TE_LAYOUTS


def main(arguments: Sequence[str] | None = None) -> int:
    from importlib.metadata import version

    from tests.layouts.gpt import runs
    from tests.layouts.gpt.layout import Report
    from tests.layouts.job import CUDA_TE
    from tests.layouts.table import machine_of, parse, parser_of, refuse_missing_gpus

    parser = parser_of(__doc__, devices=False)
    parser.add_argument("--list", action="store_true", help="show the layouts and stop")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave logs and records there")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at once (default: 1)"
    )
    layouts, options = parse(parser, TE_LAYOUTS, arguments)
    if options.list:
        print(runs.listing(layouts))
        return 0
    refuse_missing_gpus(parser, "cuda")
    machine = f"{machine_of('cuda')}, Transformer Engine {version('transformer-engine')}"
    mark = "<!-- te-{}: made by `tests/layouts/te_layouts.py`; not to be edited by hand -->"
    tables = {
        servers: dataclasses.replace(
            table,
            begin=mark.format("updates" if servers else "sums"),
            keys=[layout.name for layout in TE_LAYOUTS if layout.servers == servers],
        )
        for servers, table in runs.ALL.items()
    }

    def put(report: Report) -> None:
        if options.markdown is not None:
            runs.put(options.markdown, report, tables, machine)

    good, _ = runs.run_layouts("te-layouts", layouts, CUDA_TE, options, put)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
