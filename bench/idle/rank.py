"""A rank of bench/idle/run.py: sums many keys, counts memory, then does nothing and is watched.

``python -m bench.idle.rank SPEC RESULT``, as bench.pushpull.rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import byteps.torch as bps
import torch
import torch.distributed as dist

from bench.kit import machine


@dataclass(frozen=True, kw_only=True)
class Idle:
    """What rank 0 saw of itself, and of the servers."""

    worker_core: float
    """Part of a core that a worker uses while nothing is summed."""
    server_core: float
    """The same of the busiest server."""
    scheduler_core: float
    worker_bytes_beyond: int
    """Memory that a worker gained by joining and summing, without the gradients themselves."""
    server_bytes_per_key: float
    """Memory that all servers together hold for each key, accumulators included."""
    accumulator_bytes_per_key: int
    """What the sums themselves take of that."""


def _sum(tensors: list[torch.Tensor], names: list[str]) -> None:
    pairs = zip(tensors, names, strict=True)
    handles = [bps.push_pull_async_inplace(t, average=False, name=name) for t, name in pairs]
    for handle in handles:
        bps.synchronize(handle)


def _memory(pids: list[int]) -> int:
    return sum(machine.resident_bytes(pid) for pid in pids)


def watch(spec: dict[str, Any]) -> Idle:
    """All ranks call it together."""
    scheduler, *servers = spec["node_pids"]
    keys, size = spec["keys"], spec["key_bytes"]
    tensors = [torch.ones(size // 4) for _ in range(keys)]
    names = [f"idle.{index}" for index in range(keys)]
    dist.barrier()
    own = machine.resident_bytes(os.getpid())
    bps.init()
    # Threads, buffers and queues are there after the first sums; what comes later is the keys'.
    few = keys // 10 + 1
    _sum(tensors[:few], names[:few])
    dist.barrier()
    before = _memory(servers)
    for _ in range(3):
        _sum(tensors[few:], names[few:])
    dist.barrier()
    held = _memory(servers) - before
    gained = machine.resident_bytes(os.getpid()) - own
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
    """Part of a core that each process uses meanwhile."""
    time.sleep(1.0)  # let the last responses be done
    begin, before = time.monotonic(), [machine.process_cpu_ns(pid) for pid in pids]
    time.sleep(seconds)
    after, spent = [machine.process_cpu_ns(pid) for pid in pids], time.monotonic() - begin
    return [(b - a) / 1e9 / spent for a, b in zip(before, after, strict=True)]


def main(arguments: list[str]) -> int:
    spec_file, result_file = map(Path, arguments)
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
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
