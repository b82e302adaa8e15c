#!/usr/bin/env python3
"""Runs the project's set of push-pull experiments and compares them with their thresholds.

Experiments on emulated links need root. With --json the record is extended after each experiment.
With --resume, recorded experiments are shown, not measured again. --from-json measures nothing.
--markdown writes the results into a document, between its marks. docs/results/method.md explains
everything.

To save time: --launches makes fewer launches of each, --budget begins no experiment after that many
seconds. --brief prints a line per figure and threshold at the end.

Exit status: 0 all thresholds are reached; 1 a threshold was missed, a result was wrong, or a run
failed; 2 bad usage.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from bench.kit.emulation import EmulationError
from bench.kit.plan import ONE_NIC
from bench.kit.processes import LaunchError, become_interruptible
from bench.kit.record import metadata, parse_size, show_size, topology_text
from bench.pushpull import launch
from bench.pushpull.launch import Row, Run, progress, rows, run_plan
from bench.pushpull.sets import QUICK, SETS, choose
from bench.pushpull.tables import (
    BEGIN,
    END,
    Experiment,
    brief_tables,
    demand_hardware,
    gate_table,
    judge_all,
    ratio_pairs,
    ratio_table,
    result_table,
    results,
)
from scripts.progress import aligned, put_between

_COLOURS = {
    "byteps": "tab:blue",
    ONE_NIC: "tab:purple",
    "gloo": "tab:orange",
    "gloo-nodes": "tab:olive",
    "nccl": "tab:green",
    "nccl-nodes": "tab:cyan",
    "sockets": "tab:gray",
}
_DASHES = ("-", "--", ":", "-.")
_OF_LIMIT = ("of-limit", "of M/B")
_RATIO = ("NCCL's time over BytePS's", "speed over NCCL's (min..max)")
"""Columns of tables in documents."""


def _figure(title: str) -> tuple[Any, Any]:
    # The import is here, because matplotlib takes a second to import, and most runs draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.grid(alpha=0.3)
    return figure, axes


def _lines(run: Run) -> list[tuple[str, str, str, list[Row]]]:
    """Return (label, colour, dashes, rows by size) for each backend and element type."""
    everything = rows(run)
    dtypes = sorted({row.case.dtype for row in everything})
    lines = []
    for backend in run.plan.backends:
        for dtype in dtypes:
            chosen = [r for r in everything if r.backend == backend and r.case.dtype == dtype]
            chosen.sort(key=lambda row: row.case.size)
            dashes = _DASHES[dtypes.index(dtype) % len(_DASHES)]
            lines.append((f"{backend}, {dtype}", _COLOURS[backend], dashes, chosen))
    return lines


def _size_axis(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [show_size(size) for size in sizes], rotation=30)
    axes.set_xlabel("size")


def draw(run: Run, folder: Path) -> list[Path]:
    """Draw the run's figures as pictures; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [_draw_times(run, folder / "time.png")]
    if run.plan.topology.link_bits:
        made.append(_draw_of_limit(run, folder / "of-limit.png"))
    if len(run.plan.backends) > 1:
        made.append(_draw_ratios(run, folder / "ratio.png"))
    return made


def parts_of_limit(run: Run) -> dict[str, float]:
    """Return, for each backend, the first backend's least possible time divided by this backend's
    median time.

    The largest case counts. The limit is the same for all, so the fractions compare times. Empty if
    links have no limit.
    """
    case = max(run.plan.cases, key=lambda case: case.size)
    row_of = {row.backend: row for row in rows(run) if row.case == case}
    ours = row_of.get(run.plan.backends[0])
    if ours is None or ours.of_limit is None:
        return {}
    limit_s = ours.of_limit * ours.p50_s
    return {backend: limit_s / row.p50_s for backend, row in row_of.items()}


@dataclass(frozen=True)
class Parts:
    """Speeds of an experiment."""

    label: str
    of_limit: Mapping[str, float]
    """For each backend: the first backend's least possible time divided by this backend's time."""


def _parts(run: Run) -> Parts:
    case = max(run.plan.cases, key=lambda case: case.size)
    return Parts(f"{run.name}\n{show_size(case.size)} {case.dtype}", parts_of_limit(run))


def draw_overview(runs: Sequence[Run], path: Path) -> None:
    """Draw many runs in one picture: each backend's fraction of link bandwidth.

    Args:
        runs: runs to draw. Those without a limit or launches are left out.
        path: path that ends in ``.png``, ``.svg`` or another format of matplotlib.
    """
    draw_parts([parts for run in runs if run.launches if (parts := _parts(run)).of_limit], path)


def described(experiments: Sequence[Parts]) -> str:
    """Return all figures of a picture as its text description."""
    return "; ".join(
        f"{parts.label.replace(chr(10), ', ')}: "
        + ", ".join(f"{backend} {part:.2f}" for backend, part in parts.of_limit.items())
        for parts in experiments
    )


def draw_parts(experiments: Sequence[Parts], path: Path) -> None:
    """Draw the fraction of link bandwidth of each backend in each experiment."""
    backends = list(dict.fromkeys(backend for parts in experiments for backend in parts.of_limit))
    # The import is here for the same reason as in _figure.
    from matplotlib.patches import Patch

    figure, axes = _figure("Push-pull of gradients: fraction of link bandwidth")
    figure.set_size_inches(8.5, 1.4 + 0.7 * max(len(experiments), 1))
    for at, parts in enumerate(experiments):
        height = 0.8 / max(len(parts.of_limit), 1)
        for number, (backend, part) in enumerate(parts.of_limit.items()):
            y = at + (number - (len(parts.of_limit) - 1) / 2) * height
            bars = axes.barh(y, part, height * 0.92, color=_COLOURS[backend])
            axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(experiments)), [parts.label for parts in experiments], fontsize=8)
    axes.set_ylim(max(len(experiments), 1) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("time at the links' limit / median time; longer is faster")
    if backends:
        axes.legend(
            handles=[Patch(color=_COLOURS[name], label=name) for name in backends],
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
        )
    figure.savefig(path, metadata={"Description": described(experiments)})


def _draw_times(run: Run, path: Path) -> Path:
    topology = run.plan.topology
    title = f"Sum over {topology.workers} workers, {topology.servers} servers: median time"
    figure, axes = _figure(title)
    for label, colour, dashes, line in _lines(run):
        sizes = [row.case.size for row in line]
        times = [row.p50_s * 1e3 for row in line]
        axes.plot(sizes, times, dashes, color=colour, marker="o", label=label)
    _size_axis(axes, sorted({case.size for case in run.plan.cases}))
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.legend()
    figure.savefig(path)
    return path


def _draw_of_limit(run: Run, path: Path) -> Path:
    figure, axes = _figure("Fraction of link bandwidth")
    for label, colour, dashes, line in _lines(run):
        points = [(row.case.size, row.of_limit) for row in line if row.of_limit is not None]
        axes.plot(*zip(*points, strict=True), dashes, color=colour, marker="o", label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    _size_axis(axes, sorted({case.size for case in run.plan.cases}))
    axes.set_ylabel("least time / median time")
    axes.legend()
    figure.savefig(path)
    return path


def _draw_ratios(run: Run, path: Path) -> Path:
    pairs = ratio_pairs(run)
    figure, axes = _figure(f"{run.plan.backends[0]}: times as fast, and the launches' spread")
    labels = [f"{show_size(case.size)} {case.dtype}\n{theirs}" for case, _, theirs, _ in pairs]
    values = [ratio.value for *_, ratio in pairs]
    below = [ratio.value - min(ratio.low, ratio.value) for *_, ratio in pairs]
    above = [max(ratio.high, ratio.value) - ratio.value for *_, ratio in pairs]
    axes.bar(range(len(pairs)), values, yerr=[below, above], capsize=4, color="tab:blue")
    axes.set_xticks(range(len(pairs)), labels, fontsize=8)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("times as fast")
    figure.savefig(path)
    return path


def _tables(text: str) -> Iterator[list[dict[str, str]]]:
    """Yield each table's rows, by column."""
    head: list[str] = []
    rows: list[dict[str, str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            if not head:
                head = cells
            elif set(cells[0]) != {"-"} or len(cells[0]) < 3:
                # If two columns have the same name, the first is BytePS's, and it is kept.
                rows.append(dict(reversed([*zip(head, cells, strict=False)])))
            continue
        if head:
            yield rows
            head, rows = [], []


def _number(cell: str) -> float | None:
    match = re.match(r"\**(\d+(?:\.\d+)?)", cell)
    return float(match[1]) if match else None


def _of_results(rows: Sequence[Mapping[str, str]]) -> Iterator[Parts]:
    """Yield, for each experiment in the tables of `make bench`, the largest size."""
    for name in dict.fromkeys(row["experiment"] for row in rows):
        own = [row for row in rows if row["experiment"] == name]
        size = max((row["size"] for row in own), key=lambda size: parse_size(size.split()[0]))
        chosen = [row for row in own if row["size"] == size]
        ours = _number(chosen[0]["of-limit"])
        if ours is None:
            continue
        parts = {"byteps": ours}
        for row in chosen:
            if row["backend"] != "-":
                parts[row["backend"]] = ours * float(row["ms"]) / float(row["its ms"])
        yield Parts(f"{name}\n{size}", parts)


def _with_nccl(row: Mapping[str, str]) -> Parts | None:
    """Parse a row of a table for tensors on GPUs."""
    ours = next((_number(row[name]) for name in _OF_LIMIT if name in row), None)
    ratio = next((_number(row[name]) for name in _RATIO if name in row), None)
    if ours is None or ratio is None:
        return None
    label = f"{row['workers + servers']}, {row['links']}, GPU\n{row['size']}"
    return Parts(label, {"byteps": ours, "nccl": ours / ratio})


def parts_in(text: str) -> list[Parts]:
    """Return, for each experiment on links with a limit, each backend's fraction of that limit.

    Args:
        text: text of a document such as docs/results/figures.md.

    Raises:
        ValueError: the text has no results.
    """
    before, begin, rest = text.partition(BEGIN)
    written, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there are no results, which begin with {BEGIN!r} and end with {END!r}")
    parts_of_pages: list[Parts | None] = []
    for table in _tables(written):
        parts_of_pages += _of_results(table)
    for table in _tables(before + after):
        if any(name in table[0] for name in _RATIO):
            parts_of_pages += [_with_nccl(row) for row in table]
    return [parts for parts in parts_of_pages if parts is not None]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=sorted(SETS), default=QUICK, dest="set_name")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these experiments")
    parser.add_argument("--list", action="store_true", help="show the experiments and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="record everything")
    parser.add_argument("--resume", action="store_true", help="go on with the record of --json")
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="report on this record")
    parser.add_argument(
        "--from-markdown", type=Path, metavar="FILE", help="draw --chart of this document's tables"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="pictures, a folder for each")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="one picture of all experiments")
    parser.add_argument("--launches", type=int, metavar="N", help="of each backend, not as the set")
    parser.add_argument("--budget", type=float, metavar="S", help="begin nothing new after so long")
    parser.add_argument("--brief", action="store_true", help="one compact table at the end")
    options = parser.parse_args(arguments)
    if options.resume and not options.json:
        parser.error("--resume needs the record: --json FILE")
    if options.from_markdown and not options.chart:
        parser.error("--from-markdown needs the picture to draw: --chart FILE")
    if options.launches is not None and options.launches < 1:
        parser.error("--launches must be 1 at least")
    options.begun = time.monotonic()
    return options


def show(experiment: Experiment, run: Run, *, brief: bool) -> bool:
    """Print the results of an experiment. Return whether it reaches its thresholds."""
    verdicts = judge_all(experiment.gates, run)
    good = run.wrong == 0 and all(verdict.ok for verdict in verdicts)
    if brief:
        return good
    print(f"\n## {experiment.name}: {experiment.why}")
    print(f"# topology: {topology_text(run.plan.topology)}")
    if not run.quiet:
        print("# machine: too busy in every round; none is left out")
    for table in (result_table(run), ratio_table(run), gate_table(verdicts)):
        print(aligned(table) + "\n", flush=True)
    return good


def measure(experiments: Sequence[Experiment], options: argparse.Namespace) -> Iterator[Run]:
    """Run experiments one after the other. A failure does not stop the rest."""
    deadline = None if options.budget is None else options.begun + options.budget
    for experiment in experiments:
        if deadline is not None and time.monotonic() > deadline:
            progress(f"{experiment.name}: not begun, since --budget is used up")
            continue
        try:
            yield run_plan(experiment.plan, experiment.name, deadline)
        except (LaunchError, EmulationError) as error:
            progress(f"{experiment.name} FAILED: {error}")


def earlier(
    meta: dict[str, str], options: argparse.Namespace
) -> tuple[Sequence[Run], dict[str, str]]:
    """Return the runs and metadata of the record that --resume continues.

    Raises:
        ValueError: the record is from another version of the engine, or another machine.
    """
    if not options.resume or not options.json.exists():
        return (), meta
    runs, before = launch.read(options.json)
    for name in ("byteps", "hardware", "settings"):
        if before.get(name) != meta[name]:
            raise ValueError(
                f"{options.json} cannot be resumed: its {name} is {before.get(name)!r}, "
                f"and now {meta[name]!r}; begin another record"
            )
    return runs, before


def draw_document(document: Path, chart: Path) -> int:
    """Draw the tables of a document. Return the exit status."""
    try:
        experiments = parts_in(document.read_text(encoding="utf-8"))
        chart.parent.mkdir(parents=True, exist_ok=True)
        draw_parts(experiments, chart)
    except (OSError, ValueError) as error:
        print(f"suite.py: {document}: {error}", file=sys.stderr)
        return 1
    print(f"{chart}: {len(experiments)} experiments")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.from_markdown:
        return draw_document(options.from_markdown, options.chart)
    try:
        experiments = choose(options.set_name, options.only)
    except ValueError as error:
        print(f"suite.py: {error}", file=sys.stderr)
        return 2
    if options.list:
        for experiment in experiments:
            print(f"{experiment.name}: {experiment.why}")
        return 0
    if options.launches is not None:
        experiments = [experiment.of_launches(options.launches) for experiment in experiments]
    try:
        if not options.from_json:
            demand_hardware(experiments)
    except ValueError as error:
        print(f"suite.py: {error}", file=sys.stderr)
        return 2
    meta = metadata(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.from_json:
            runs, meta = launch.read(options.from_json)
            return report(experiments, runs, meta, options)
        loaded, meta = earlier(meta, options)
        names = {run.name for run in loaded}
        new = measure(
            [experiment for experiment in experiments if experiment.name not in names], options
        )
        return report(experiments, chain(loaded, new), meta, options, loaded)
    except (OSError, ValueError) as error:
        print(f"suite.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was started has been ended", file=sys.stderr)
        return 130


def report(
    experiments: Sequence[Experiment],
    runs: Iterable[Run],
    meta: dict[str, str],
    options: argparse.Namespace,
    loaded: Sequence[Run] = (),
) -> int:
    """Show each run when it ends, and record it together with the kept runs. Return the exit
    status."""
    by_name = {experiment.name: experiment for experiment in experiments}
    done: list[tuple[Experiment, Run]] = []
    good = True
    for name, text in meta.items():
        print(f"# {name}: {text}")
    for run in runs:
        if run.name not in by_name:
            continue
        if run.plan != by_name[run.name].plan:
            raise ValueError(f"{run.name} was recorded for another set, or another version of it")
        done.append((by_name[run.name], run))
        good = show(*done[-1], brief=options.brief) and good
        if options.json:
            shown = [run for _, run in done]
            names = {run.name for run in shown}
            launch.write([*shown, *(r for r in loaded if r.name not in names)], meta, options.json)
        if options.plot:
            draw(run, options.plot / run.name)
    if options.chart and done:
        options.chart.parent.mkdir(parents=True, exist_ok=True)
        draw_overview([run for _, run in done], options.chart)
    if options.brief:
        judged = [(run, judge_all(experiment.gates, run)) for experiment, run in done]
        print("\n".join(aligned(table) for table in brief_tables(judged) if len(table) > 1))
    missing = [name for name in by_name if name not in {run.name for _, run in done}]
    if missing:
        print(f"no results of: {', '.join(missing)}", file=sys.stderr)
    if options.markdown and done:
        put_between(options.markdown, BEGIN, END, f"\n{results(done, meta)}\n")
    return 0 if good and not missing else 1


if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
