#!/usr/bin/env python3
"""Measures CPU time and memory of an idle BytePS job.

Starts a scheduler, servers and workers on loopback, sums many small tensors, and then measures the
processes while they wait. Memory is a process's private resident memory.

Exit status: 0 success; 1 a process failed or a threshold was missed; 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.kit import record
from bench.kit.emulation import LOOPBACK
from bench.kit.plan import Topology
from bench.kit.processes import (
    LaunchError,
    Placement,
    Processes,
    become_interruptible,
    plain_environment,
    start_nodes,
    start_workers,
)
from bench.kit.record import parse_size, show_size
from scripts.progress import Progress

if TYPE_CHECKING:
    import torch

_RANK_OF_IDLE = "BENCH_IDLE_RANK"
"""Environment variable that makes a process run this module as a rank. Only ranks import torch."""


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
    """Start all processes, wait for their end, and return rank 0's result. Raises LaunchError."""
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
        environment = {**environment, **job, _RANK_OF_IDLE: "1"}
        start_workers("bench.idle.run", spec, result, placement, processes, environment)
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
    """Return descriptions of values above their thresholds. A threshold that is None holds
    always."""
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


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Rank 0's measurements of its own process and of the servers."""

    worker_core: float
    """Fraction of a core that an idle worker uses."""
    server_core: float
    """Fraction of a core that the busiest idle server uses."""
    scheduler_core: float
    worker_bytes_beyond: int
    """Memory that a worker has gained by joining and summing, without the gradients."""
    server_bytes_per_key: float
    """Memory of all servers together per key, including accumulators."""
    accumulator_bytes_per_key: int
    """Bytes of `server_bytes_per_key` that the sums need."""


def _sum(tensors: list[torch.Tensor], names: list[str]) -> None:
    import byteps.torch as bps

    pairs = zip(tensors, names, strict=True)
    handles = [bps.push_pull_async_inplace(t, average=False, name=name) for t, name in pairs]
    for handle in handles:
        bps.synchronize(handle)


def _memory(pids: list[int]) -> int:
    return sum(record.resident_bytes(pid) for pid in pids)


def watch(spec: dict[str, Any]) -> Idle:
    """Sum many keys, and measure memory. Then measure idle CPU time. All ranks call this
    together."""
    import byteps.torch as bps
    import torch
    import torch.distributed as dist

    scheduler, *servers = spec["node_pids"]
    keys, size = spec["keys"], spec["key_bytes"]
    tensors = [torch.ones(size // 4) for _ in range(keys)]
    names = [f"idle.{index}" for index in range(keys)]
    dist.barrier()
    own = record.resident_bytes(os.getpid())
    bps.init()
    # The first sums create threads, buffers and queues. Later growth is due to keys.
    few = keys // 10 + 1
    _sum(tensors[:few], names[:few])
    dist.barrier()
    before = _memory(servers)
    for _ in range(3):
        _sum(tensors[few:], names[few:])
    dist.barrier()
    held = _memory(servers) - before
    gained = record.resident_bytes(os.getpid()) - own
    cores = _watch_idle([os.getpid(), scheduler, *servers], spec["seconds"])
    dist.barrier()
    bps.shutdown()
    return Idle(
        worker_core=cores[0],
        scheduler_core=cores[1],
        server_core=max(cores[2:]),
        worker_bytes_beyond=gained,
        server_bytes_per_key=held / (keys - few),
        accumulator_bytes_per_key=size,
    )


def _watch_idle(pids: list[int], seconds: float) -> list[float]:
    """Return the fraction of a core that each process uses during `seconds`."""
    time.sleep(1.0)  # lets the last answers finish
    begin, before = time.monotonic(), [record.process_cpu_ns(pid) for pid in pids]
    time.sleep(seconds)
    after, spent = [record.process_cpu_ns(pid) for pid in pids], time.monotonic() - begin
    return [(b - a) / 1e9 / spent for a, b in zip(before, after, strict=True)]


def rank_main(spec_file: Path, result_file: Path) -> None:
    """Run as a rank. `run` has started this process with a specification file and a result file."""
    import torch.distributed as dist

    spec = json.loads(spec_file.read_text())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec['rendezvous']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    idle = watch(spec)
    if dist.get_rank() == 0:
        result_file.write_text(json.dumps(asdict(idle)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if os.environ.get(_RANK_OF_IDLE):
        rank_main(*map(Path, sys.argv[1:]))
    else:
        become_interruptible()
        sys.exit(main())
