#!/usr/bin/env python3
"""Runs the project's set of push-pull experiments and compares them with their thresholds.

Experiments on emulated links need root. With --json the record grows after each experiment; with
--resume those that it holds are shown, not measured again. --from-json measures nothing. --markdown
writes the results into a document, between its marks. docs/results/method.md explains everything.

Where time is short: --launches takes fewer of each, --budget begins nothing new after so many
seconds, and --brief prints one line for each figure and each threshold, after all is done.

Exit status: 0 all thresholds are reached; 1 one was missed, a result was wrong, or a run failed;
2 bad usage.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from bench.kit.emulation import EmulationError
from bench.kit.errors import LaunchError
from bench.kit.interrupts import become_interruptible
from bench.kit.record import metadata, topology_text
from bench.pushpull import samples
from bench.pushpull.driver import progress, run_plan
from bench.pushpull.experiment import Experiment, demand_hardware
from bench.pushpull.gates import judge_all
from bench.pushpull.markdown import replace_results, results
from bench.pushpull.sets import QUICK, SETS, choose
from bench.pushpull.summary import Run
from bench.pushpull.tables import brief_tables, gate_table, ratio_table, result_table
from scripts.columns import aligned


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
    """Print what an experiment came to; whether it is as it must be."""
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
    """Run them one after the other; one that fails does not stop the rest."""
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
    """What --resume goes on with: its runs, and the metadata of the record.

    Raises:
        ValueError: it was recorded with another version of the engine, or on another machine.
    """
    if not options.resume or not options.json.exists():
        return (), meta
    runs, before = samples.read(options.json)
    for name in ("byteps", "hardware", "settings"):
        if before.get(name) != meta[name]:
            raise ValueError(
                f"{options.json} cannot be resumed: its {name} is {before.get(name)!r}, "
                f"and now {meta[name]!r}; begin another record"
            )
    return runs, before


def draw_document(document: Path, chart: Path) -> int:
    """Draw what the tables of a document say; the exit status."""
    from bench.pushpull.document import parts_in
    from bench.pushpull.plots import draw_parts

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
        experiments = [one.of_launches(options.launches) for one in experiments]
    try:
        if not options.from_json:
            demand_hardware(experiments)
    except ValueError as error:
        print(f"suite.py: {error}", file=sys.stderr)
        return 2
    meta = metadata(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.from_json:
            runs, meta = samples.read(options.from_json)
            return report(experiments, runs, meta, options)
        kept, meta = earlier(meta, options)
        names = {run.name for run in kept}
        new = measure([one for one in experiments if one.name not in names], options)
        return report(experiments, chain(kept, new), meta, options, kept)
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
    kept: Sequence[Run] = (),
) -> int:
    """Show each run as it comes, and record it next to those that are kept; the exit status."""
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
            samples.write([*shown, *(r for r in kept if r.name not in names)], meta, options.json)
        if options.plot:
            from bench.pushpull.plots import draw

            draw(run, options.plot / run.name)
    if options.chart and done:
        from bench.pushpull.plots import draw_overview

        options.chart.parent.mkdir(parents=True, exist_ok=True)
        draw_overview([run for _, run in done], options.chart)
    if options.brief:
        judged = [(run, judge_all(one.gates, run)) for one, run in done]
        print("\n".join(aligned(table) for table in brief_tables(judged) if len(table) > 1))
    missing = [name for name in by_name if name not in {run.name for _, run in done}]
    if missing:
        print(f"no results of: {', '.join(missing)}", file=sys.stderr)
    if options.markdown and done:
        replace_results(options.markdown, results(done, meta))
    return 0 if good and not missing else 1


if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
