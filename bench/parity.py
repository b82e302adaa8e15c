#!/usr/bin/env python3
"""Shows that training through BytePS gives the gradients that all-reduce gives.

Trains each layout of a table (data, tensor, context, pipeline and expert parallelism, distributed
optimizer, overlap, accumulation, element types) from one seed through torch.distributed and through
BytePS, on this machine's CPU or (--device cuda) each rank on a GPU of its own, and compares every
gradient bucket and the loss of every step on every rank.
docs/results/correctness.md has the requirements, and the table that --markdown writes.

Exit status: 0 all is as it must be; 1 a miss, or a rank failed, whose log is shown; 2 bad usage.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paritykit.compare import Report
    from paritykit.layouts import Layout
    from paritykit.platforms import Platform
    from prepare_data import Dataset

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "Megatron-LM"

sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "scripts"), str(TREE)]

from progress import Progress  # noqa: E402


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {number}")
    return number


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layout", nargs="+", default=[], metavar="NAME", help="only these (default: all)"
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="cuda: over NCCL; ranks that outnumber the GPUs share them (default: %(default)s)",
    )
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="layouts at once (default: 1)"
    )
    parser.add_argument(
        "--budget", type=float, metavar="S", help="begin nothing new after so many seconds"
    )
    parser.add_argument("--list", action="store_true", help="show the layouts and stop")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="write the documentation; with --layout and on a CPU, only these rows of it",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave logs and records there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    from paritykit.layouts import by_name

    try:
        layouts = by_name(options.layout)
    except ValueError as error:
        print(f"parity.py: {error}", file=sys.stderr)
        return 2
    if options.list:
        from paritykit.report import listing

        print(listing(layouts))
        return 0
    if not (TREE / "pretrain_dpu_gpt.py").is_file():
        print(f"parity.py: {TREE} is not assembled: run `make setup`", file=sys.stderr)
        return 1
    from paritykit.platforms import PLATFORMS

    if options.device == "cuda":
        from benchkit import gpus

        if not gpus.count_gpus():
            print("parity.py: --device cuda needs a GPU, and torch sees none", file=sys.stderr)
            return 1
    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        folder = options.keep or Path(scratch)
        platform = PLATFORMS[options.device]
        reports = compare_all(layouts, folder, platform, options.jobs, options.budget)
    tell(reports, options.markdown, options.device, rows_only=bool(options.layout))
    compared = {report.layout.name for report in reports}
    missing = [layout.name for layout in layouts if layout.name not in compared]
    if missing:
        print(f"not begun, since --budget is used up: {' '.join(missing)}")
    good = reports and not missing and not any(report.misses for report in reports)
    return 0 if good else 1


def compare_all(
    layouts: Sequence[Layout],
    folder: Path,
    platform: Platform,
    jobs: int = 1,
    budget: float | None = None,
) -> list[Report]:
    """Run so many of them at a time; a failed one does not stop the rest. After ``budget`` seconds
    none is begun: what is left has no report."""
    from paritykit.data import tiny_dataset

    deadline = math.inf if budget is None else time.monotonic() + budget
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    dataset = tiny_dataset(data)
    with (
        Progress("parity", total=len(layouts), unit="layouts") as shown,
        ThreadPoolExecutor(max_workers=jobs) as pool,
    ):

        def one(layout: Layout) -> Report | None:
            if time.monotonic() > deadline:
                return None
            return compare_one(layout, folder, dataset, platform, shown)

        return [report for report in pool.map(one, layouts) if report is not None]


def compare_one(
    layout: Layout, folder: Path, dataset: Dataset, platform: Platform, shown: Progress
) -> Report:
    """Run one and say how it went."""
    from paritykit.compare import Report
    from paritykit.forked import JobFailed
    from paritykit.runs import check

    shown.update(layout.name)
    start = time.monotonic()
    shutil.rmtree(folder / layout.name, ignore_errors=True)
    try:
        report = check(layout, folder / layout.name, dataset, platform)
    except JobFailed as error:
        print(error, file=sys.stderr)
        report = Report(layout=layout, misses=["a rank failed"])
    verdict = "; ".join(report.misses) or "ok"
    if report.update is not None:
        verdict += f", parameters differ by {report.update.parameters:.1e}"
    elif report.groups:  # a run that is interrupted has then shown what there was to see
        verdict += f", error {report.ours.worst:.2e}, all-reduce's {report.theirs.worst:.2e}"
    shown.step()
    shown.say(f"{layout.name}: {verdict} ({time.monotonic() - start:.0f} s)", stream=sys.stdout)
    return report


def tell(
    reports: list[Report], markdown: Path | None, device: str, *, rows_only: bool = False
) -> None:
    """Print the table, and write the document of this kind of device where one is asked for; of
    that of a CPU with `rows_only` just the rows of these layouts, if it is there."""
    from paritykit import report as text
    from paritykit.layouts import LAYOUTS
    from paritykit.merging import merged

    if reports:
        print("\n" + text.summary(reports))
    if markdown is not None:
        document = (text.markdown_on_gpus if device == "cuda" else text.markdown)(reports)
        if rows_only and device == "cpu" and markdown.exists():
            order = [layout.name for layout in LAYOUTS]
            document = merged(markdown.read_text(encoding="utf-8"), document, order)
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(document, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
