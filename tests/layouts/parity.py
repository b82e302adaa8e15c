#!/usr/bin/env python3
"""Shows that training through BytePS gives the gradients that all-reduce gives.

Trains each layout of a table (data, tensor, context, pipeline and expert parallelism, distributed
optimizer, overlap, accumulation, dtypes) from the same seed through torch.distributed and through
BytePS. Ranks run on this machine's CPU, or with --device cuda on a GPU each. Every gradient bucket
and the loss of every step are compared on every rank.

docs/results/correctness.md states the requirements, and has the tables that --markdown writes; with
--device cuda a page about the machine is written instead. --transformer-engine trains other
layouts, with layers of Transformer Engine, on GPUs with fp8 (Hopper or later).

Exit status: 0 success; 1 a difference, or a failed rank, whose log is shown; 2 bad usage.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

# This is the only import of the project here, because every rank imports this file.
from tests.layouts.gpt.rows import LAYOUTS, Layout
from tests.layouts.gpt.te_rows import TE_LAYOUTS

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "Megatron-LM"
TE_MARK = (
    "<!-- te-{}: made by `tests/layouts/parity.py --transformer-engine`; "
    "not to be edited by hand -->"
)


def main(arguments: Sequence[str] | None = None) -> int:
    from importlib.metadata import version

    from tests.layouts.gpt import runs
    from tests.layouts.gpt.layout import Report
    from tests.layouts.job import CUDA_TE, PLATFORMS
    from tests.layouts.table import chosen, machine_of, parser_of, refuse_missing_gpus

    parser = parser_of(__doc__)
    parser.add_argument("--transformer-engine", action="store_true", help="its layouts")
    parser.add_argument("--list", action="store_true", help="show the layouts and stop")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave logs and records there")
    options = parser.parse_args(arguments)
    engine = options.transformer_engine
    layouts = chosen(parser, TE_LAYOUTS if engine else LAYOUTS, options)
    if options.list:
        print(runs.listing(layouts))
        return 0
    options.device = "cuda" if engine else options.device
    refuse_missing_gpus(parser, options.device)
    if not (TREE / "pretrain_dpu_gpt.py").is_file():
        print(f"parity.py: {TREE} is not assembled: run `make setup`", file=sys.stderr)
        return 1

    tables, machine = runs.ALL, ""
    if engine:
        machine = f"{machine_of('cuda')}, Transformer Engine {version('transformer-engine')}"
        tables = {
            servers: dataclasses.replace(
                table,
                begin=TE_MARK.format("updates" if servers else "sums"),
                keys=[layout.name for layout in TE_LAYOUTS if layout.servers == servers],
            )
            for servers, table in runs.ALL.items()
        }
    is_page = options.markdown is not None and options.device == "cuda" and not engine

    def put(_: Layout, report: Report) -> None:
        if options.markdown is not None and not is_page:
            runs.put(options.markdown, report, tables, machine)

    platform = CUDA_TE if engine else PLATFORMS[options.device]
    good, reports = runs.run_layouts("parity", layouts, platform, options, put)
    if reports:
        print("\n" + runs.summary(reports))
    if is_page:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(runs.page(machine_of("cuda"), reports), encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
