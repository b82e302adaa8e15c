#!/usr/bin/env python3
"""Measures what the backend of torch.distributed costs in Python: `dist.all_reduce` compared with
`bps.push_pull_inplace`, of one tensor, interleaved.

Two ranks and a server run on this machine, and both forms are seen to work. For the timed calls the
engine is taken away: what is left is Python's part, and torch's. Of all calls the fastest tenth
counts, for whatever else a machine does only adds to it.

Exit status: 0 the threshold is reached; 1 it was missed, or a process failed; 2 bad usage.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.kit.emulation import LOOPBACK
from bench.kit.errors import LaunchError
from bench.kit.interrupts import become_interruptible
from bench.kit.launch import Placement, run_job
from bench.kit.plan import Topology
from bench.kit.processes import Processes
from bench.kit.record import metadata
from scripts.columns import aligned

TIMEOUT_S = 600.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--bytes", type=int, default=1 << 20, help="of the tensor (default: 1 MiB)")
    add("--calls", type=int, default=3000, help="of each form (default: 3000)")
    add("--max-us", type=float, metavar="US", help="fail where all_reduce takes so much more")
    options = parser.parse_args(arguments)
    if options.calls < 1 or options.bytes < 4:
        parser.error("--calls must be at least 1, --bytes at least 4")
    return options


def launch(options: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds of each call, by form. Raises LaunchError where a process fails or is late."""
    with (
        tempfile.TemporaryDirectory(prefix="calls-") as folder,
        Processes(Path(folder)) as processes,
    ):
        placement = Placement(Topology(workers=2, servers=1), [LOOPBACK])
        ours = {"BYTEPS_C10D_BACKEND": "flat", "BYTEPS_START_TIMEOUT_S": "200"}
        spec = {"bytes": options.bytes, "calls": options.calls}
        program = "bench.frameworks.call_rank"
        return dict(run_job(program, spec, placement, processes, ours, TIMEOUT_S))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        took = launch(options)
    except LaunchError as error:
        print(f"bench/frameworks/calls.py: {error}", file=sys.stderr)
        return 1
    given = sys.argv[1:] if arguments is None else arguments
    print("\n".join(f"# {name}: {text}" for name, text in metadata(given).items()))
    fast = {form: sorted(calls)[len(calls) // 10] for form, calls in took.items()}
    table = [("form", "us, of the fastest tenth", "median")]
    for form, calls in took.items():
        table.append((form, f"{fast[form]:.1f}", f"{statistics.median(calls):.1f}"))
    print(aligned(table))
    more = fast["all_reduce"] - fast["push_pull_inplace"]
    limit = options.max_us
    missed = limit is not None and more > limit
    told = "" if limit is None else f", {'MISSED' if missed else 'at most'} {limit:g}"
    print(f"# all_reduce takes {more:.1f} us more{told}")
    return 1 if missed else 0


if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
