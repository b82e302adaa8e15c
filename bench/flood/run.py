#!/usr/bin/env python3
"""What a flood of unauthenticated connections costs a job: start, links, memory, files, log lines.

Starts jobs on loopback, without a flood and with one at the scheduler or at the server: connections
that are made all at once, and others at a rate for as long as the job runs. Breaks a link with the
process that is flooded. Memory, files and lines are those of that one process, beyond what it has
without a flood.

Exit status: 0 all is well; 1 a process failed, or a threshold was missed; 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.children import free_ports
from tests.multiproc.cluster import LOOPBACK, Cluster, Nursery, Process, wait_all
from tests.multiproc.endings import connections_of
from tests.multiproc.flood import KINDS, Flood, Plan

MOST_SECONDS_MORE = 5.0
MOST_LINES, MOST_MIB, MOST_FILES = 10, 64.0, 1024
RECONNECT_TIMEOUT_S = 30.0
WORKERS = 2
TARGETS = ("scheduler", "server")
LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Result:
    target: str
    kind: str
    connections: int
    """Made at once; 0: no flood."""
    sources: int
    start_s: float
    """From the start of the nodes after the one that is flooded until all workers have summed."""
    again_ms: int
    """Until the link that broke was there again."""
    lines: int
    mib: float
    files: int


def memory_and_files(process: Process) -> tuple[float, int]:
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024, len(os.listdir(f"/proc/{process.pid}/fd"))


def break_link(cluster: Cluster, port: int) -> int:
    """Of the first worker with who listens at a port; how many milliseconds it was away."""
    worker = cluster.workers["worker 0"]
    for one in connections_of(worker.pid):
        if one.remote == port:
            one.reset()
    deadline = time.monotonic() + LIMIT_S
    pattern = r"broke, and was made again after (\d+) ms"
    while not (found := re.findall(pattern, worker.text)):
        if time.monotonic() > deadline or not worker.running:
            raise RuntimeError(f"the link was not made again:\n{worker.text}")
        time.sleep(0.01)
    return max(int(ms) for ms in found)


def measure(
    target: str, kind: str, connections: int, sources: int, rate: float, nursery: Nursery
) -> Result:
    with tempfile.TemporaryDirectory(prefix="flood-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        server_port = free_ports(1)
        env = {"BYTEPS_NODE_PORT": str(server_port), "BYTEPS_TCP_CONNECTIONS": "1"}
        env["BYTEPS_RECONNECT_TIMEOUT_S"] = f"{RECONNECT_TIMEOUT_S:g}"
        cluster = stack.enter_context(
            Cluster(folder / "job", nursery, workers=WORKERS, servers=1, env=env)
        )
        flooded: Process = cluster.start_scheduler()
        port = cluster.port
        if target == "server":
            flooded, port = cluster.start_server(), server_port
            wait_until_it_listens(flooded, port)
        before = memory_and_files(flooded)
        if connections:
            plan = Plan(
                address=(LOOPBACK, port), kind=kind, burst=connections, rate=rate, sources=sources
            )
            stack.enter_context(Flood(plan, folder)).wait_ready()
        began = time.monotonic()
        if target != "server":
            cluster.start_server()
        for rank in range(WORKERS):
            cluster.start_worker(rank, "failures:checked", most=1000)
        cluster.wait_mark("looping", range(WORKERS), LIMIT_S)
        start_s = time.monotonic() - began
        again_ms = break_link(cluster, port)
        after = memory_and_files(flooded)
        cluster.go("end")
        wait_all(cluster.workers.values(), LIMIT_S)
        cluster.demand_checks()
        lines = len(re.findall(r"(?:pending_peers|greeter|listener)\.cc", flooded.text))
        cluster.finish(LIMIT_S)
    mib, files = (late - early for late, early in zip(after, before, strict=True))
    return Result(
        target=target, kind=kind, connections=connections, sources=sources, start_s=start_s,
        again_ms=again_ms, lines=lines, mib=mib, files=int(files),
    )  # fmt: skip


def wait_until_it_listens(process: Process, port: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    wanted = f":{port:04X} "
    while wanted not in Path("/proc/net/tcp").read_text():
        if time.monotonic() > deadline or not process.running:
            raise RuntimeError(f"it does not listen:\n{process.text}")
        time.sleep(0.01)


def misses(result: Result, without: Result) -> list[str]:
    """Which thresholds it missed, against a job that nobody floods."""
    bounds = {
        "start_s": (result.start_s - without.start_s, MOST_SECONDS_MORE),
        "again_ms": (result.again_ms, RECONNECT_TIMEOUT_S * 1000),
        "lines": (result.lines - without.lines, MOST_LINES),
        "mib": (result.mib - without.mib, MOST_MIB),
        "files": (result.files - without.files, MOST_FILES),
    }
    return [
        f"{name} +{value:g} > {most:g}" for name, (value, most) in bounds.items() if value > most
    ]


def median(results: Sequence[Result]) -> Result:
    """The one of the median start, with the worst of everything else."""
    middle = sorted(results, key=lambda one: one.start_s)[len(results) // 2]
    worst = {
        name: max(getattr(one, name) for one in results)
        for name in ("again_ms", "lines", "mib", "files")
    }
    return Result(
        **{**asdict(middle), **worst, "start_s": statistics.median(r.start_s for r in results)}
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, nargs="+", default=[5000, 10_000])
    parser.add_argument("--rate", type=float, default=1000.0, help="per second (default: 1000)")
    parser.add_argument("--kind", choices=KINDS, default="silent")
    parser.add_argument("--target", choices=TARGETS, nargs="+", default=list(TARGETS))
    parser.add_argument("--launches", type=int, default=3, help="of each (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    print(f"# {options.kind} connections, all at once and then {options.rate:g} per second")
    print(f"# median start and worst of the rest of {options.launches}; {os.cpu_count()} cores")
    head = ("target", "connections", "sources", "start_s", "again_ms", "lines", "mib", "files")
    print(("{:>12}" * len(head)).format(*head), flush=True)
    records, missed = [], []
    with tempfile.TemporaryDirectory(prefix="flood-bench-") as name:
        nursery = Nursery(Path(name))
        try:
            # Pays for the import of torch.
            measure(options.target[0], options.kind, 0, 0, options.rate, nursery)
            for target in options.target:
                without = None
                cases = [(0, 0), *((n, s) for n in options.connections for s in (0, 1))]
                launches: dict[tuple[int, int], list[Result]] = {case: [] for case in cases}
                for _ in range(options.launches):
                    for case, results in launches.items():
                        results.append(measure(target, options.kind, *case, options.rate, nursery))
                for results in launches.values():
                    result = median(results)
                    without = without or result
                    bad = misses(result, without)
                    missed += bad
                    where = "another" if result.sources else "own" if result.connections else "-"
                    print(
                        f"{target:>12}{result.connections:12}{where:>12}{result.start_s:12.2f}"
                        f"{result.again_ms:12}{result.lines:12}{result.mib:12.1f}{result.files:12}"
                        + "".join(f"  MISSED {one}" for one in bad),
                        flush=True,
                    )
                    records.append({**asdict(result), "missed": bad})
        finally:
            nursery.close()
    if options.json:
        options.json.write_text(json.dumps({"schema": 1, "results": records}, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
