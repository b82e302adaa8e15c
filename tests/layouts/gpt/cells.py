"""Runs the layouts of a table and tells what came of each."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.progress import Progress

from ..command import run_cells
from ..data import tiny_dataset
from ..job import JobFailed, start_fork_server
from ..platforms import Platform
from . import report as text
from . import runs
from .outcome import Report
from .rows import Layout


def run_layouts(
    name: str,
    layouts: Sequence[Layout],
    platform: Platform,
    options: argparse.Namespace,
    put: Callable[[Report], None],
) -> tuple[bool, list[Report]]:
    """Train each layout both ways, compare, and print a table.

    Args:
        name: of the command.
        options: ``jobs``, ``budget``, and ``keep``: a folder for logs and records, or None.
        put: called for each report, in the order of the layouts.

    Returns:
        whether all were run and all is as it must be; and what came of each.
    """
    start_fork_server([runs.PROGRAM.partition(":")[0], "tests.layouts.warm"], platform)
    reports: list[Report] = []
    with (
        tempfile.TemporaryDirectory(prefix=f"{name}-") as scratch,
        Progress(name, total=len(layouts), unit="layouts") as bar,
    ):
        folder = options.keep or Path(scratch)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        dataset = tiny_dataset(folder / "data")

        def run(layout: Layout) -> Report:
            start = time.monotonic()
            shutil.rmtree(folder / layout.name, ignore_errors=True)
            try:
                report = runs.check(layout, folder / layout.name, dataset, platform)
            except JobFailed as error:
                bar.say(str(error))
                report = Report(layout=layout, misses=["a rank failed"])
            # A run that is interrupted has then shown what there was to see.
            took = f"{time.monotonic() - start:.0f} s"
            bar.say(f"{layout.name}: {text.verdict(report)} ({took})", stream=sys.stdout)
            return report

        def tell(layout: Layout, report: Report) -> list[str]:
            reports.append(report)
            put(report)
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
    return good, reports
