#!/usr/bin/env python3
"""Times the sum of tensors over all workers, through BytePS's servers, gloo's ring, or NCCL's.

The backend "sockets" sums nothing: plain sockets move as many bytes between as many processes.

Every result is compared with a closed form. An iteration is as long as its slowest rank took. With
several backends and launches they take turns, and ratios are shown with their spread.

  bench/pushpull_bench.py                                          two workers on loopback
  bench/pushpull_bench.py --workers 4 --servers 4 --emulate 8@500mbit --sizes 64MiB \\
      --iters 5 --launches 5                                       links of 500 Mbit/s
  torchrun --nproc-per-node 2 bench/pushpull_bench.py              an existing job

docs/results/method.md says how each figure comes about.

Exit status: 0 all is well; 1 a wrong result, a threshold that was missed, or a process that failed;
2 bad usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from bench.kit.emulation import EmulationError, remove_stale
from bench.kit.errors import LaunchError
from bench.kit.interrupts import become_interruptible
from bench.kit.plan import Plan
from bench.pushpull.gates import Gate, judge_all
from bench.pushpull.options import in_cluster, make_gates, make_plan, parse
from bench.pushpull.summary import Run
from scripts.columns import aligned


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments, __doc__ or "")
    if options.remove_stale:
        print("\n".join(remove_stale()) or "nothing was left behind")
        return 0
    try:
        plan = make_plan(options, os.environ)
        gates = make_gates(options, plan)
    except ValueError as error:
        print(f"pushpull_bench.py: {error}", file=sys.stderr)
        return 2
    try:
        run = measure(plan)
    except (LaunchError, EmulationError) as error:
        print(f"pushpull_bench.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was started has been ended", file=sys.stderr)
        return 130
    if run is None:  # another rank reports
        return 0
    return report(run, gates, options, sys.argv[1:] if arguments is None else arguments)


def measure(plan: Plan) -> Run | None:
    """Run the plan; None on the ranks of a job that do not report."""
    # Only where it is needed: torch takes seconds to import.
    if in_cluster(os.environ):
        from bench.pushpull.cluster import run_in_cluster

        return run_in_cluster(plan)
    from bench.pushpull.driver import run_plan

    return run_plan(plan)


def report(
    run: Run, gates: Sequence[Gate], options: argparse.Namespace, arguments: Sequence[str]
) -> int:
    """Print and write what came out; the exit status."""
    from bench.kit import record
    from bench.pushpull import samples, tables

    meta = record.metadata(arguments)
    print(record.header(meta, run.plan))
    if not run.quiet:
        print("# machine: too busy in every round; none is left out")
    print(aligned(tables.result_table(run)))
    if len(run.plan.backends) > 1:
        print("\n" + aligned(tables.ratio_table(run)))
    verdicts = judge_all(gates, run)
    if verdicts:
        print("\n" + aligned(tables.gate_table(verdicts)))
    if options.json:
        samples.write([run], meta, options.json)
    if options.plot:
        from bench.pushpull.plots import draw

        draw(run, options.plot)
    return 1 if run.wrong or not all(verdict.ok for verdict in verdicts) else 0


if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
