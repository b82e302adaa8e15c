#!/usr/bin/env python3
"""Runs the project's set of push-pull experiments and holds them against their bars.

Experiments on emulated links need root. With --json the record grows after each experiment;
--from-json reports on an earlier record instead of measuring. --markdown writes the results into a
document, between its marks. docs/benchmarking.md explains everything.

Exit status: 0 all bars are reached; 1 a bar was missed, a result was wrong, or a run failed; 2 bad
usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from benchkit import record
from benchkit.columns import aligned
from benchkit.driver import progress, run_plan
from benchkit.emulation import EmulationError
from benchkit.gates import judge_all
from benchkit.interrupts import become_interruptible
from benchkit.markdown import replace_results, results
from benchkit.processes import LaunchError
from benchkit.sets import QUICK, SETS, Experiment, choose
from benchkit.summary import Run
from benchkit.tables import gate_table, ratio_table, result_table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=sorted(SETS), default=QUICK, dest="set_name")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these experiments")
    parser.add_argument("--list", action="store_true", help="show the experiments and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="record everything")
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="report on this record")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="pictures, a folder for each")
    return parser.parse_args(arguments)


def show(experiment: Experiment, run: Run) -> bool:
    """Print what an experiment came to; whether it is as it must be."""
    verdicts = judge_all(experiment.gates, run)
    print(f"\n## {experiment.name}: {experiment.why}")
    print(f"# topology: {record.topology_text(run.plan.topology)}")
    if not run.quiet:
        print("# machine: too busy in every round; none is left out")
    for table in (result_table(run), ratio_table(run), gate_table(verdicts)):
        print(aligned(table) + "\n", flush=True)
    return run.wrong == 0 and all(verdict.ok for verdict in verdicts)


def measure(experiments: Sequence[Experiment], options: argparse.Namespace) -> Iterator[Run]:
    """Run them one after the other; one that fails does not stop the rest."""
    for experiment in experiments:
        try:
            yield run_plan(experiment.plan, experiment.name)
        except (LaunchError, EmulationError) as error:
            progress(f"{experiment.name} FAILED: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        experiments = choose(options.set_name, options.only)
    except ValueError as error:
        print(f"suite.py: {error}", file=sys.stderr)
        return 2
    if options.list:
        for experiment in experiments:
            print(f"{experiment.name}: {experiment.why}")
        return 0
    meta = record.metadata(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.from_json:
            runs, meta = record.read(options.from_json)
            return report(experiments, runs, meta, options)
        return report(experiments, measure(experiments, options), meta, options)
    except (OSError, ValueError) as error:
        print(f"suite.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was started has been ended", file=sys.stderr)
        return 130


def report(
    experiments: Sequence[Experiment],
    runs: Iterator[Run] | Sequence[Run],
    meta: dict[str, str],
    options: argparse.Namespace,
) -> int:
    """Show, and record, each run as it comes; the exit status."""
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
        good = show(*done[-1]) and good
        if options.json:
            record.write([run for _, run in done], meta, options.json)
        if options.plot:
            from benchkit.plots import draw

            draw(run, options.plot / run.name)
    missing = [name for name in by_name if name not in {run.name for _, run in done}]
    if missing:
        print(f"no results of: {', '.join(missing)}", file=sys.stderr)
    if options.markdown and done:
        replace_results(options.markdown, results(done, meta))
    return 0 if good and not missing else 1


if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
