#!/usr/bin/env python3
"""Measures how much Python time the torch.distributed backend adds: `dist.all_reduce` is compared
with `bps.push_pull_inplace` on the same tensor, interleaved.

Two ranks and a server run on this machine, and the results of both calls are checked. The timed
calls bypass the engine, so only the time in Python and torch is left. Only the fastest tenth of all
calls counts, because other load on the machine can only add time.

With --device cuda there are two servers, and the engine is used. The benchmark then measures the
host time of `dist.all_reduce(async_op=True)` on GPU tensors. For each size, the median counts.

  bench/frameworks/calls.py --device cuda --bytes 1048576,268435456 --calls 50 --max-us 500

Exit status: 0 the threshold is reached; 1 it was missed, or a process failed; 2 bad usage.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.kit.emulation import LOOPBACK
from bench.kit.plan import Topology
from bench.kit.processes import LaunchError, Placement, Processes, become_interruptible, run_job
from bench.kit.record import metadata
from scripts.progress import aligned

TIMEOUT_S = 600.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    add("--bytes", default=str(1 << 20), metavar="N,...", help="of the tensor (default: 1 MiB)")
    add("--calls", type=int, default=3000, help="of each form (default: 3000)")
    add("--max-us", type=float, metavar="US", help="fail where all_reduce takes (so much) more")
    options = parser.parse_args(arguments)
    try:
        options.bytes = [int(size) for size in options.bytes.split(",")]
    except ValueError as error:
        parser.error(f"--bytes: {error}")
    if options.calls < 1 or min(options.bytes) < 4:
        parser.error("--calls must be at least 1, --bytes at least 4")
    if options.device == "cpu" and len(options.bytes) > 1:
        parser.error("--bytes takes one size on a CPU")
    return options


def launch(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the microseconds of each call, by the form of the call. Raises LaunchError if a
    process fails or times out."""
    with (
        tempfile.TemporaryDirectory(prefix="calls-") as folder,
        Processes(Path(folder)) as processes,
    ):
        servers = 2 if options.device == "cuda" else 1
        placement = Placement(Topology(workers=2, servers=servers), [LOOPBACK])
        ours = {"BYTEPS_C10D_BACKEND": "flat", "BYTEPS_START_TIMEOUT_S": "200"}
        spec = {"bytes": options.bytes, "calls": options.calls, "device": options.device}
        program = "bench.frameworks.rank"
        return dict(run_job(program, spec, placement, processes, ours, TIMEOUT_S))


def _judge_calls(took: Mapping[str, Sequence[float]], limit: float | None) -> int:
    """Print the median of each size. Return the exit status."""
    most = max(statistics.median(calls) for calls in took.values())
    missed = limit is not None and most > limit
    verdict = "" if limit is None else f", {'MISSED' if missed else 'at most'} {limit:g}"
    print(f"# a call takes {most:.1f} us of the host{verdict}")
    return 1 if missed else 0


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
    if options.device == "cuda":
        return _judge_calls(took, options.max_us)
    more = fast["all_reduce"] - fast["push_pull_inplace"]
    limit = options.max_us
    missed = limit is not None and more > limit
    verdict = "" if limit is None else f", {'MISSED' if missed else 'at most'} {limit:g}"
    print(f"# all_reduce takes {more:.1f} us more{verdict}")
    return 1 if missed else 0


if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
