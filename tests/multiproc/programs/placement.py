"""Which server gets how much."""

from __future__ import annotations

import math
import mmap

import byteps.torch as bps
import torch
from byteps.torch import engine

from .job import Job

MB = 1_000_000

# Bytes of the buckets or tensors that a worker sums in a step.
SETS: dict[str, list[int]] = {
    "40M elements a bucket, fp32": [160 * MB] * 8 + [57 * MB],
    "40M elements a bucket, bf16": [80 * MB] * 8 + [28_500_000],
    "one bucket of 7B in bf16": [14_000 * MB],
    "a layer's tensors, each by itself": [4096 * 4, 4096 * 12 * 4, 64 * MB, 192 * MB, 256 * MB]
    * 24,
    "many experts": [160 * MB] * 2 + [2 * MB] * 64,
    "small buckets": [40_000] * 500,
    "one partition each": [4096] * 1000,
}


def dealt(sizes: list[int]) -> list[int]:
    """As Megatron's buckets are placed: each begins where the one before ended."""
    place, total = 0, [0] * servers()
    for number, nbytes in enumerate(sizes):
        part = bps.bytes_per_server(nbytes, name=f"dealt/{number}", placement=place)
        assert sum(part) == nbytes
        total = [a + b for a, b in zip(total, part, strict=True)]
        place += bps.partition_count(nbytes)
    return total


def by_name(sizes: list[int]) -> list[int]:
    """As tensors without a placement are."""
    parts = [bps.bytes_per_server(size, name=f"t{i}") for i, size in enumerate(sizes)]
    return [sum(column) for column in zip(*parts, strict=True)]


def servers() -> int:
    return len(bps.bytes_per_server(1, name="x"))


def spread(job: Job) -> None:
    """Sums that are dealt out load all servers alike, whatever the number of either."""
    bps.init()
    with job.check("number of servers"):
        assert servers() == job.args["servers"]
    for label, sizes in SETS.items():
        with job.check(f"dealt: {label}"):
            loads = dealt(sizes)
            assert max(loads) <= 1.02 * sum(loads) / len(loads), loads
        with job.check(f"by name: {label}"):
            loads = by_name(sizes)
            # Each server gets its part of a large tensor; small ones fall where they may.
            largest = max(bps.partition_count(size) for size in sizes)
            limit = 1.05 if largest >= 64 else 1.5
            assert max(loads) <= limit * sum(loads) / len(loads), loads
    with job.check("refused"):
        try:
            bps.bytes_per_server(4, name="x", group=[job.size])
        except ValueError as error:
            assert "group of 'x'" in str(error) or "rank" in str(error), str(error)
        else:
            raise AssertionError("a group of strangers was accepted")
    bps.shutdown()


def hashed(job: Job) -> None:
    """The other hash leaves no server without work."""
    bps.init()
    for label in ("40M elements a bucket, fp32", "one partition each"):
        with job.check(label):
            loads = by_name(SETS[label])
            assert min(loads) > 0, loads
    bps.shutdown()


def by_link(job: Job) -> None:
    """Partitions are longer where the slowest worker's link is known to be fast."""
    bps.init()
    with job.check("all know the slowest worker's link"):
        assert engine.link_gbps() == job.args["slowest"]
    size = 16 << 20
    with job.check("partitions are as long as it wants them"):
        worth = int(math.sqrt(size * engine.link_gbps() * 1e9 / 8 * 2e-6))
        pages = -(-max(size // 64, worth) // mmap.PAGESIZE)
        assert bps.partition_bytes(size) == pages * mmap.PAGESIZE
    with job.check("so they are summed"):
        ones = torch.ones(size // 4)
        assert bps.push_pull(ones, average=False, name="ones").eq(job.size).all()
    bps.shutdown()
