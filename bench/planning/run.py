#!/usr/bin/env python3
"""Times what Python costs in a job of thousands of ranks: the plan at start-up, and each push.

One process takes itself for a rank of a job that does not exist (made_up.py): nothing is sent, and
what is timed is this rank's own work alone. The plan is that of
megatron.core.distributed.dpu_reduce for a model of --groups bucket groups, routes, names, places
and declarations included. A push is byteps.torch's, up to the engine, over a group of --members. Of
several runs the fastest counts: whatever else a machine does only adds to it.

Exit status: 0 all is well; 1 a time above a threshold; 2 bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from byteps.torch import engine
from megatron.core.distributed.dpu_reduce import plan

from bench.planning.made_up import MadeUp
from scripts.columns import aligned

RUNS = 3
PUSHES = 2000
ELEMENTS = 1 << 20
OPTIMIZERS = {"whole": 0, "sharded": 1, "sharded in each host": -1}
"""Instances of the distributed optimizer; -1: one on each host."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8192, help="of the job (default: 8192)")
    parser.add_argument("--per-host", type=int, default=8, help="of these (default: 8)")
    parser.add_argument("--groups", type=int, default=50, help="bucket groups (default: 50)")
    parser.add_argument("--members", type=int, default=4096, help="of a push (default: 4096)")
    parser.add_argument("--max-plan", type=float, metavar="S", help="seconds of a plan")
    parser.add_argument("--max-push", type=float, metavar="US", help="microseconds of a push")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    options = parser.parse_args(arguments)
    if options.per_host < 1 or options.ranks < 1 or options.ranks % options.per_host:
        parser.error("--ranks must be a multiple of --per-host")
    if options.members < 1 or options.groups < 1:
        parser.error("--members and --groups must be positive")
    return options


def plan_seconds(made_up: MadeUp) -> float:
    """Of the fastest of several."""
    times = []
    for _ in range(RUNS):
        model = made_up.model()
        with made_up.joined(), contextlib.redirect_stdout(io.StringIO()):
            begin = time.perf_counter()
            plan.register(model)
            times.append(time.perf_counter() - begin)
    return min(times)


def push_seconds(members: int, group: Callable[[], engine.Group]) -> float:
    """Of the fastest tenth of many, after the first."""
    tensor, own = torch.zeros(1024), group()
    times = []
    with MadeUp(ranks=members, per_host=1, groups=1, elements=members).joined():
        for _ in range(PUSHES):
            begin = time.perf_counter()
            engine.start(
                tensor,
                tensor,
                average=False,
                name="bucket",
                priority=0,
                group=own,
                placement=0,
            )
            times.append(time.perf_counter() - begin)
    return sorted(times[1:])[PUSHES // 10]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    elements = -(-ELEMENTS // options.ranks) * options.ranks
    common = {"ranks": options.ranks, "per_host": options.per_host, "groups": options.groups}
    rows: list[tuple[str, str, float, float | None]] = []
    for name, instances in OPTIMIZERS.items():
        count = options.ranks // options.per_host if instances < 0 else instances
        made_up = MadeUp(**common, elements=elements, instances=count)
        rows.append((f"plan, gradients {name}", "s", plan_seconds(made_up), options.max_plan))
    push = push_seconds(options.members, lambda: tuple(range(options.members)))
    rows.append((f"push, {options.members} members", "us", push * 1e6, options.max_push))
    print(f"# {options.ranks} ranks, {options.per_host} per host, {options.groups} bucket groups")
    table = [("what", "unit", "time", "at most", "gate")]
    for what, unit, value, most in rows:
        gate = "-" if most is None else "ok" if value <= most else "MISS"
        table.append((what, unit, f"{value:.3f}", "-" if most is None else f"{most:g}", gate))
    print(aligned(table))
    if options.json:
        results = [{"what": w, "unit": u, "time": t, "most": m} for w, u, t, m in rows]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"schema": 1, **common, "results": results}) + "\n")
    return int(any(most is not None and value > most for _, _, value, most in rows))


if __name__ == "__main__":
    sys.exit(main())
