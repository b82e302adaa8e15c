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

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# No more than these: every rank imports this file.
from tests.layouts.gpt.rows import LAYOUTS, Layout

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "Megatron-LM"


def main(arguments: Sequence[str] | None = None) -> int:
    from scripts.progress import Progress
    from tests.layouts.command import machine_of, parse, parser_of, run_cells
    from tests.layouts.data import tiny_dataset
    from tests.layouts.gpt import report as text
    from tests.layouts.gpt.outcome import Report
    from tests.layouts.gpt.runs import PROGRAM, check
    from tests.layouts.job import JobFailed, start_fork_server
    from tests.layouts.platforms import PLATFORMS

    parser = parser_of(__doc__)
    parser.add_argument("--list", action="store_true", help="show the layouts and stop")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave logs and records there")
    layouts, options = parse(parser, LAYOUTS, arguments)
    if options.list:
        print(text.listing(layouts))
        return 0
    if not (TREE / "pretrain_dpu_gpt.py").is_file():
        print(f"parity.py: {TREE} is not assembled: run `make setup`", file=sys.stderr)
        return 1
    platform = PLATFORMS[options.device]
    start_fork_server([PROGRAM.partition(":")[0], "tests.layouts.warm"], platform)
    reports: list[Report] = []
    with (
        tempfile.TemporaryDirectory(prefix="parity-") as scratch,
        Progress("parity", total=len(layouts), unit="layouts") as bar,
    ):
        folder = options.keep or Path(scratch)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        dataset = tiny_dataset(folder / "data")

        def run(layout: Layout) -> Report:
            start = time.monotonic()
            shutil.rmtree(folder / layout.name, ignore_errors=True)
            try:
                report = check(layout, folder / layout.name, dataset, platform)
            except JobFailed as error:
                bar.say(str(error))
                report = Report(layout=layout, misses=["a rank failed"])
            # A run that is interrupted has then shown what there was to see.
            took = f"{time.monotonic() - start:.0f} s"
            bar.say(f"{layout.name}: {text.verdict(report)} ({took})", stream=sys.stdout)
            return report

        def tell(layout: Layout, report: Report) -> list[str]:
            reports.append(report)
            if options.markdown is not None and options.device == "cpu":
                text.put(options.markdown, report)
            return report.misses

        good = run_cells(
            layouts,
            run,
            tell,
            title=lambda layout: layout.name,
            bar=bar,
            jobs=options.jobs,
            budget=options.budget,
        )
    if reports:
        print("\n" + text.summary(reports))
    if options.markdown is not None and options.device == "cuda":
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(text.page(machine_of("cuda"), reports), encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
