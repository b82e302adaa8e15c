"""Trains a layout through both backends, compares the runs, and formats the results.

The results are cells of a table for the terminal, and rows of tables in documents.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scripts.prepare_data import Dataset
from scripts.progress import Progress, aligned, pipes

from ..job import (
    CPU,
    TWO_SERVERS,
    Job,
    JobFailed,
    Platform,
    data_arguments,
    start_fork_server,
    tiny_dataset,
)
from ..table import Table, run_cells
from .compare import FEW_BITS_ENVIRONMENT, compare
from .layout import Report
from .rows import LAYOUTS, Layout
from .updates import compare_updates

PROGRAM = "tests.layouts.gpt.rank:train"
FLAG = "--use-dpu-reduce"
GPUS_APART = 3
"""Distance between the first GPUs of consecutive layouts, so that concurrent layouts spread
evenly."""
# Pieces are small, so that pieces of one bucket are summed inside the host and between hosts at the
# same time.
_SERVERS = {**TWO_SERVERS, "BYTEPS_NODE_PIECE_BYTES": "2048"}


def train(
    layout: Layout,
    folder: Path,
    data: Sequence[str],
    *,
    through_byteps: bool,
    platform: Platform = CPU,
    program: str = PROGRAM,
    fails: bool = False,
    options: Mapping[str, object] | None = None,
) -> Job:
    """Run a layout through a backend, each rank in a process.

    Raises:
        JobFailed: A rank failed. With ``fails``: no rank failed.
    """
    arguments = [*platform.arguments, *layout.megatron_arguments(), *data]
    environment: dict[str, str] = {}
    few: dict[str, str] = {}
    if through_byteps:
        arguments += layout.byteps_arguments()
        few = FEW_BITS_ENVIRONMENT if layout.has_few_bits else {}
        environment = {**_SERVERS, **few, **dict(layout.environment)}
    settings = {
        "arguments": arguments,
        "environment": environment,
        "frozen": layout.frozen,
        "exact": layout.is_held_against_fp64,
        "bits_per_host": layout.per_host if few and layout.servers else 0,
        "packed": layout.packed,
        "graphed": layout.graphed,
        "family": layout.family,
        **(options or {}),
    }
    first_gpu = GPUS_APART * LAYOUTS.index(layout) if layout in LAYOUTS else 0
    job = Job(folder, program, layout.ranks, settings, platform, layout.per_host, first_gpu)
    job.run(fails=fails)
    return job


def check(layout: Layout, folder: Path, dataset: Dataset, platform: Platform = CPU) -> Report:
    """Train the layout through both backends, in a new folder, and compare.

    Raises:
        JobFailed: A run failed, or a layout that must be refused ran.
    """
    data = data_arguments(dataset)
    folder.mkdir(parents=True)
    if layout.refused:
        return _check_refused(layout, folder, data, platform)
    ours = train(layout, folder / "byteps", data, through_byteps=True, platform=platform)
    theirs = train(layout, folder / "all-reduce", data, through_byteps=False, platform=platform)
    held = compare_updates if layout.servers else compare
    return held(layout, ours.results(), theirs.results())


def _check_refused(layout: Layout, folder: Path, data: Sequence[str], platform: Platform) -> Report:
    job = train(layout, folder / "byteps", data, through_byteps=True, platform=platform, fails=True)
    report = Report(layout=layout)
    flag = "--dpu-optimizer" if layout.servers else FLAG
    text = f"{flag} does not work with {layout.refused}"
    for rank in range(layout.ranks):
        if text not in job.log_of(rank).read_text(errors="replace"):
            report.misses.append(f"rank {rank} did not say '{text}'")
    return report


def run_layouts(
    name: str,
    layouts: Sequence[Layout],
    platform: Platform,
    options: argparse.Namespace,
    put: Callable[[Layout, Report], None],
) -> tuple[bool, list[Report]]:
    """Train each layout through both backends and compare; see run_reports."""
    start_fork_server(["tests.layouts.warm", PROGRAM.partition(":")[0]], platform)
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as scratch:
        folder = options.keep or Path(scratch)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        dataset = tiny_dataset(folder / "data")
        return run_reports(
            name,
            layouts,
            folder,
            options,
            lambda layout, folder: check(layout, folder, dataset, platform),
            put,
        )


def run_reports[R: Layout](
    name: str,
    rows: Sequence[R],
    folder: Path,
    options: argparse.Namespace,
    check_row: Callable[[R, Path], Report],
    put: Callable[[R, Report], None],
) -> tuple[bool, list[Report]]:
    """Check each row in a folder of its own, and print its result.

    Args:
        name: Name of the command.
        options: ``budget``, and ``jobs`` if several rows may run at once.
        put: Called with each report, in the order of the rows.

    Returns:
        Whether all rows ran and passed, and the report of each.
    """
    reports: list[Report] = []
    with Progress(name, total=len(rows), unit="rows") as bar:

        def run(row: R) -> Report:
            start = time.monotonic()
            shutil.rmtree(folder / row.name, ignore_errors=True)
            try:
                report = check_row(row, folder / row.name)
            except JobFailed as error:
                bar.say(str(error))
                report = Report(layout=row, misses=["a rank failed"])
            # An interrupted run has already printed the results so far.
            took = f"{time.monotonic() - start:.0f} s"
            bar.say(f"{row.name}: {verdict(report)} ({took})", stream=sys.stdout)
            return report

        def tell(row: R, report: Report) -> list[str]:
            reports.append(report)
            put(row, report)
            return report.misses

        jobs = getattr(options, "jobs", 1)
        good = run_cells(
            rows,
            run,
            tell,
            title=lambda row: row.name,
            bar=bar,
            jobs=jobs,
            budget=options.budget,
        )
    return good, reports


# ----- tables


_MADE_BY = "made by `make parity MARKDOWN=docs/results/correctness.md`"
_MARK = f"<!-- {{}}: {_MADE_BY}; not to be edited by hand -->"

_FEATURES = (
    *("layout", "ranks", "DP", "TP", "CP", "PP", "VPP", "EP", "optimizer", "overlap", "acc"),
    *("dtype", "also"),
)
SUMS = Table(
    begin=_MARK.format("sums"),
    head=("layout", "error", "error of all-reduce", "losses differ"),
    align="lrrr",
    keys=[layout.name for layout in LAYOUTS if not layout.servers],
)
UPDATES = Table(
    begin=_MARK.format("updates"),
    head=("layout", "error", "error of Megatron's", "parameters differ"),
    align="lrrr",
    keys=[layout.name for layout in LAYOUTS if layout.servers],
)

_LARGEST = ("largest of them: error", "error of all-reduce", "losses differ")
Tables = Mapping[bool, Table]
"""Titles of the tables, by whether servers keep the optimizer."""
ALL: Tables = {False: SUMS, True: UPDATES}

_ON_GPUS = """# Correctness on GPUs

<!-- Generated by `tests/layouts/parity.py --device cuda --markdown FILE`. -->

The comparison of [correctness.md](correctness.md), with the same requirements, on {machine}:
all-reduce is NCCL's ring, and BytePS copies gradients to servers on the host. Ranks of a host have
a GPU each where there are as many; hosts share GPUs, and so do ranks that outnumber them, which
NCCL then takes to be on several machines. Without Transformer Engine and Apex, and with PyTorch's
deterministic kernels, so that two runs can be compared bit by bit.
"""


def put(document: Path, report: Report, tables: Tables = ALL, machine: str = "") -> None:
    """Write a layout's row into the document.

    Args:
        machine: The machine that ran the layout, written above the table; empty for no such line.

    Raises:
        SystemExit: The document has no place for the row.
    """
    table = tables[report.layout.servers]
    table.put(document, [_cells(report)], machine)


def page(machine: str, reports: Sequence[Report]) -> str:
    """Format a page about a machine with GPUs: the results of all layouts by dtype."""
    parts = [_ON_GPUS.format(machine=machine)]
    for servers, title in ((False, "Sums"), (True, "The optimizer on the servers")):
        if chosen := [report for report in reports if report.layout.servers == servers]:
            parts += [f"## {title}", "", *pipes(by_type(chosen)), ""]
    missed = [report.layout.name for report in reports if report.misses]
    ran = {report.layout.name for report in reports}
    other = [layout.name for layout in LAYOUTS if layout.name not in ran]
    parts += [f"**MISS**: {', '.join(missed)}.", ""] if missed else []
    parts += [f"Not run: {', '.join(other)}.", ""] if other else []
    return "\n".join(parts)


def by_type(reports: Sequence[Report]) -> list[Sequence[str]]:
    """Get the largest errors of the layouts of each dtype, for sums or for the server optimizer."""
    servers = reports[0].layout.servers
    head = ("largest of them: parameters differ",) if servers else _LARGEST
    table: list[Sequence[str]] = [("type", "layouts", *head)]
    kinds: dict[str, list[Report]] = {}
    for report in reports:
        if not report.layout.refused:
            wire = report.layout.wire
            kind: str = f"sent as {wire}" if wire else report.layout.dtype
            kinds.setdefault(kind, []).append(report)
    for kind, of in kinds.items():
        if servers:
            figures = [f"{max(report.update.parameters for report in of if report.update):.1e}"]
        else:
            errors = (
                max(report.ours.worst for report in of),
                max(report.theirs.worst for report in of),
            )
            differ = max(report.loss_difference for report in of)
            figures = [*(f"{error:.2e}" for error in errors), f"{differ:.1e}"]
        table.append((kind, str(len(of)), *figures))
    refused = sum(bool(report.layout.refused) for report in reports)
    if refused:
        table.append(("refused", str(refused), *["-"] * len(head)))
    return table


def summary(reports: Sequence[Report]) -> str:
    """Format the results for a terminal."""
    tables = [(table.head, _of(table, reports)) for table in (SUMS, UPDATES)]
    return "\n\n".join(aligned([head, *rows], left=1) for head, rows in tables if rows)


def listing(layouts: Sequence[Layout]) -> str:
    """Format the list of layouts for a terminal."""
    return aligned([_FEATURES, *map(_features, layouts)], left=1)


def verdict(report: Report) -> str:
    """Describe the result of a layout in a line."""
    text = "; ".join(report.misses) or "ok"
    if report.update is not None:
        return f"{text}, parameters differ by {report.update.parameters:.1e}"
    if report.groups:
        text += f", error {report.ours.worst:.2e}, all-reduce's {report.theirs.worst:.2e}"
    return text


def _cells(report: Report) -> list[str]:
    return _updates(report) if report.layout.servers else _sums(report)


def _of(table: Table, reports: Sequence[Report]) -> list[list[str]]:
    return [_cells(report) for report in reports if ALL[report.layout.servers] is table]


def _sums(report: Report) -> list[str]:
    layout = report.layout
    if report.misses or layout.refused:
        return _without_figures(report)
    errors = [f"{of.worst:.2e}" for of in (report.ours, report.theirs)]
    differ = f"{report.loss_difference:.1e}" if report.loss_difference else "0"
    return [layout.name, *errors, "same bits" if report.same_bits else differ]


def _updates(report: Report) -> list[str]:
    layout, update = report.layout, report.update
    if report.misses or update is None:
        return _without_figures(report)
    errors = [
        f"{error:.2e}" if layout.is_held_against_fp64 else "-"
        for error in (update.ours, update.theirs)
    ]
    return [layout.name, *errors, f"{update.parameters:.1e}"]


def _without_figures(report: Report) -> list[str]:
    return [report.layout.name, "-", "-", "**MISS**" if report.misses else "refused"]


def _features(layout: Layout) -> list[str]:
    return [
        layout.name,
        *(str(n) for n in (layout.ranks, layout.dp, layout.tp, layout.cp, layout.pp, layout.vpp)),
        f"{layout.ep} of {layout.experts}" if layout.experts else "-",
        _optimizer(layout),
        "yes" if layout.overlap else "-",
        str(layout.accumulation),
        layout.dtype,
        _further(layout),
    ]


def _optimizer(layout: Layout) -> str:
    if layout.servers:
        return "servers for DO" if layout.distributed_optimizer else "servers"
    if not layout.distributed_optimizer:
        return "-"
    return "DO" if layout.instances == 1 else f"DO x {layout.instances}"


def _further(layout: Layout) -> str:
    parts = [
        *layout.byteps_arguments()[3:],
        *layout.extra,
        *("=".join(pair) for pair in layout.environment),
    ]
    if layout.per_host > 1:
        parts.append(f"{layout.per_host} ranks per host")
    if layout.etp is not None:
        parts.append(f"expert TP {layout.etp}")
    if layout.experts and layout.tp > 1:
        parts.append("--sequence-parallel")
    if layout.frozen:
        parts.append(f"frozen {layout.frozen}")
    return " ".join(parts) or "-"
