#!/usr/bin/env python3
"""What a BytePS job costs while it sums nothing: CPU time, and memory.

Starts a scheduler, servers and workers on loopback, sums many small tensors, and then watches the
processes while they wait. Memory is what a process has for itself, in RAM.

Exit status: 0 all is well; 1 a process failed, or a threshold was missed; 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.kit.emulation import LOOPBACK
from bench.kit.errors import LaunchError
from bench.kit.interrupts import become_interruptible
from bench.kit.launch import Placement, start_nodes, start_workers
from bench.kit.plan import Topology
from bench.kit.processes import Processes, plain_environment
from bench.kit.units import parse_size, show_size
from scripts.progress import Progress


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--keys", type=int, default=1000, help="tensors (default: 1000)")
    parser.add_argument("--key-size", default="4KiB", metavar="SIZE", help="of each")
    parser.add_argument("--seconds", type=float, default=10.0, help="to watch (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--max-core", type=float, metavar="PART", help="threshold: a process's part of a core"
    )
    parser.add_argument(
        "--max-worker-memory", metavar="SIZE", help="threshold: a worker's, without its gradients"
    )
    return parser.parse_args(arguments)


def run(topology: Topology, spec: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Start everything, wait for its end, and return what rank 0 wrote. Raises LaunchError."""
    with (
        Progress("idle job") as shown,
        tempfile.TemporaryDirectory(prefix="idle-bench-") as folder,
        Processes(Path(folder)) as processes,
    ):
        placement, environment = Placement(topology, [LOOPBACK]), plain_environment()
        pids, job = start_nodes(placement, processes, environment)
        shown.update(f"sums {spec['keys']} tensors, then rests for {spec['seconds']:g} s")
        spec = {**spec, "node_pids": pids, "rendezvous": f"{folder}/ranks"}
        result = Path(folder) / "result.json"
        start_workers("bench.idle.rank", spec, result, placement, processes, {**environment, **job})
        processes.wait_all(timeout_s)
        return json.loads(result.read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        key_bytes = parse_size(options.key_size)
        memory_bar = parse_size(options.max_worker_memory) if options.max_worker_memory else None
        topology = Topology(workers=options.workers, servers=options.servers)
        if options.keys < 2 or key_bytes % 4:
            raise ValueError("there must be at least 2 keys, each a multiple of 4 bytes")
    except ValueError as error:
        print(f"bench/idle/run.py: {error}", file=sys.stderr)
        return 2
    spec = {"keys": options.keys, "key_bytes": key_bytes, "seconds": options.seconds}
    try:
        idle = run(topology, spec, 120.0 + 2 * options.seconds)
    except LaunchError as error:
        print(f"bench/idle/run.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was started has been ended", file=sys.stderr)
        return 130
    show(idle, options, key_bytes)
    if options.json:
        options.json.write_text(json.dumps({"schema": 1, **spec, **idle}, indent=1) + "\n")
    misses = too_much(idle, options.max_core, memory_bar)
    for miss in misses:
        print(f"MISS: {miss}")
    return 1 if misses else 0


def too_much(idle: dict[str, Any], core: float | None, memory: int | None) -> list[str]:
    """What is above a threshold, in words; a threshold of None holds nothing back."""
    misses = [
        f"an idle {what} uses {idle[f'{what}_core']:.3%} of a core, more than {core:.3%}"
        for what in ("worker", "server", "scheduler")
        if core is not None and idle[f"{what}_core"] > core
    ]
    beyond = idle["worker_bytes_beyond"]
    if memory is not None and beyond > memory:
        misses.append(
            f"a worker takes {beyond / 1e6:.2f} MB in addition to its gradients, more than "
            f"{memory / 1e6:.2f} MB"
        )
    return misses


def show(idle: dict[str, Any], options: argparse.Namespace, key_bytes: int) -> None:
    print(
        f"# {options.workers} workers, {options.servers} servers on loopback; {options.keys} keys "
        f"of {show_size(key_bytes)}; idle for {options.seconds:g} s"
    )
    for what in ("worker", "server", "scheduler"):
        print(f"{what}, idle: {idle[f'{what}_core']:.3%} of a core")
    print(f"worker, memory without the gradients: {idle['worker_bytes_beyond'] / 1e6:.2f} MB")
    print(
        f"servers, memory per key: {idle['server_bytes_per_key']:.0f} bytes, of which the sum "
        f"{idle['accumulator_bytes_per_key']}"
    )


if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
