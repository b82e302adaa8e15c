"""Declarations of many tensors: agreement of members, distribution over servers, and names declared
and used in every order."""

from __future__ import annotations

import math
import mmap
import random
import time
from collections.abc import Callable
from typing import Any

import byteps.torch as bps
import torch
from byteps.torch import engine

from tests.multiproc.programs import values
from tests.multiproc.programs.job import Job

COUNT = 3000


def tensors(job: Job, count: int) -> list[bps.TensorDeclaration]:
    """Return declarations. Every second one belongs only to the first two ranks."""
    return [
        bps.TensorDeclaration(
            name=f"tensor.{i}",
            dtype=torch.float32,
            numel=COUNT,
            average=False,
            group=[0, 1] if i % 2 else None,
            wire_dtype=torch.bfloat16 if i % 3 == 0 else None,
        )
        for i in range(count)
    ]


def _members(tensor: bps.TensorDeclaration, job: Job) -> list[int]:
    return list(tensor.group) if isinstance(tensor.group, list) else list(range(job.size))


def many(job: Job) -> None:
    """Declare two hundred tensors of two groups in one call, and sum a few of them."""
    bps.init()
    everyone = tensors(job, 200)
    own = [t for t in everyone if job.rank in _members(t, job)]
    bps.declare(own)
    bps.declare(own)
    bps.declare("a single name")
    with job.check("all are declared"):
        assert bps.get_metrics()["byteps_worker_declared_tensors"] == len(own)
    for tensor in everyone[:12]:
        if tensor not in own:
            continue
        with job.check(f"sum of {tensor.name}"):
            given = values.exact_input(COUNT, job.rank, tensor.name, 0, "float32")
            bps.push_pull_inplace(
                given,
                average=False,
                name=tensor.name,
                group=tensor.group,
                wire_dtype=tensor.wire_dtype,
            )
            ranks = _members(tensor, job)
            values.demand_exact(given, values.exact_sum(COUNT, ranks, tensor.name, 0, "float32"))
    spec: dict[str, Any] = {"name": "x", "dtype": torch.float32, "numel": COUNT}
    wrong: tuple[tuple[str, dict[str, Any]], ...] = (
        ("name", {"name": ""}),
        ("numel", {"numel": 0}),
        ("dtype", {"dtype": torch.complex64}),
        ("wire", {"wire_dtype": torch.int8}),
        ("placement", {"placement": -1}),
        ("group", {"group": [job.size + 3, job.rank]}),
    )
    for label, bad in wrong:
        with job.check_raises(f"bad {label}", ValueError, "."):
            bps.declare([bps.TensorDeclaration(**{**spec, **bad})])
    bps.shutdown()


def hashed(job: Job) -> None:
    """Ranks have different values of BYTEPS_KEY_HASH_FN. The rank that joins later is refused with
    the reason."""
    bps.init()
    if job.rank == 1:
        job.wait_go("second")
        with job.check_raises("refused", bps.BytePSError, "BYTEPS_KEY_HASH_FN=djb2"):
            bps.push_pull(torch.ones(10), average=False, name="x")
    else:
        bps.declare([bps.TensorDeclaration(name="x", dtype=torch.float32, numel=10, average=False)])
        job.mark("declared")
    job.mark("done")
    job.wait_go("end")
    bps.shutdown()


def broadcast(job: Job) -> None:
    """Broadcast of parameters without names."""
    bps.init()
    parameters = [torch.full((5,), float(10 * job.rank + i)) for i in range(3)]
    bps.broadcast_parameters(parameters, root_rank=1)
    with job.check("those of rank 1"):
        for i, parameter in enumerate(parameters):
            values.demand_exact(parameter, torch.full((5,), 10.0 + i))
    bps.shutdown()


# Distribution of bytes over servers.


MB = 1_000_000

# Bytes of the buckets or tensors that a worker sums per step.
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
    """Return the bytes of each server if tensors are placed like Megatron's buckets, where each
    tensor begins on the server after the last one."""
    placement, total = 0, [0] * servers()
    for number, nbytes in enumerate(sizes):
        part = bps.bytes_per_server(nbytes, name=f"dealt/{number}", placement=placement)
        assert sum(part) == nbytes
        total = [a + b for a, b in zip(total, part, strict=True)]
        placement += bps.partition_count(nbytes)
    return total


def by_name(sizes: list[int]) -> list[int]:
    """Return bytes per server for tensors without a placement."""
    parts = [bps.bytes_per_server(size, name=f"t{i}") for i, size in enumerate(sizes)]
    return [sum(column) for column in zip(*parts, strict=True)]


def servers() -> int:
    return len(bps.bytes_per_server(1, name="x"))


def spread(job: Job) -> None:
    """The round robin gives all servers the same load, for any number of sums and servers."""
    bps.init()
    with job.check("number of servers"):
        assert servers() == job.args["servers"]
    for label, sizes in SETS.items():
        with job.check(f"dealt: {label}"):
            loads = dealt(sizes)
            assert max(loads) <= 1.02 * sum(loads) / len(loads), loads
        with job.check(f"by name: {label}"):
            loads = by_name(sizes)
            # Each server gets its part of a large tensor. Small tensors may be on any server.
            largest = max(bps.partition_count(size) for size in sizes)
            limit = 1.05 if largest >= 64 else 1.5
            assert max(loads) <= limit * sum(loads) / len(loads), loads
    with job.check("refused"):
        try:
            bps.bytes_per_server(4, name="x", group=[job.size])
        except ValueError as error:
            assert "group of 'x'" in str(error) or "rank" in str(error), str(error)
        else:
            raise AssertionError("a group with a rank beyond the job was accepted")
    bps.shutdown()


def placed_by_hash(job: Job) -> None:
    """Place tensors by the hash function djb2. Every server must get some."""
    bps.init()
    for label in ("40M elements a bucket, fp32", "one partition each"):
        with job.check(label):
            loads = by_name(SETS[label])
            assert min(loads) > 0, loads
    bps.shutdown()


def by_link(job: Job) -> None:
    """Partitions are longer if the slowest worker's link is known to be fast."""
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


# Asynchronous handles, and names declared and used in every order.


ELEMENTS = 5000  # The tensor has several partitions of a page.


def every_order(job: Job) -> None:
    bps.init()
    ranks = list(range(job.size))

    def start(name: str, round_: int) -> int:
        given = values.exact_input(ELEMENTS, job.rank, name, round_, "float32")
        return bps.push_pull_async_inplace(given, average=False, name=name)

    def demand(handle: int, name: str, round_: int) -> None:
        want = values.exact_sum(ELEMENTS, ranks, name, round_, "float32")
        values.demand_exact(bps.synchronize(handle), want)

    # Each rank waits in a different order.
    own = random.Random(job.rank)
    orders: dict[str, Callable[[list], None]] = {
        "forward": lambda items: None,
        "reverse": lambda items: items.reverse(),
        "random": own.shuffle,
    }
    for label, reorder in orders.items():
        with job.check(f"wait in {label} order"):
            waiting = [(start(f"{label}.{i}", 0), f"{label}.{i}") for i in range(20)]
            reorder(waiting)
            for handle, name in waiting:
                demand(handle, name, 0)

    with job.check("started in a different order on each rank"):
        names = [f"shuffled.{i}" for i in range(20)]
        own.shuffle(names)
        waiting = [(start(name, 0), name) for name in names]
        for handle, name in waiting:
            demand(handle, name, 0)

    with job.check("declared in a different order on each rank"):
        names = [f"declared.{i}" for i in range(20)]
        for name in names if job.rank % 2 else reversed(names):
            bps.declare(name)
        for name in names:
            demand(start(name, 0), name, 0)

    for label, first in (("in order", 0), ("reversed", 1)):
        with job.check(f"a name used again in flight, waited for {label}"):
            rounds = [(start(f"again.{label}", round_), round_) for round_ in range(4)]
            if first:
                rounds.reverse()
            for handle, round_ in rounds:
                demand(handle, f"again.{label}", round_)

    with job.check("two hundred names at once, three rounds each"):
        many = [(start(f"all.{i}", r), f"all.{i}", r) for r in range(3) for i in range(200)]
        own.shuffle(many)
        for handle, name, round_ in many:
            demand(handle, name, round_)

    with job.check("priorities and versions change no sum"):
        handles = []
        for i in range(20):
            given = values.exact_input(ELEMENTS, job.rank, f"priority.{i}", 0, "float32")
            handles.append(
                bps.push_pull_async(
                    given, average=False, name=f"priority.{i}", version=i, priority=-i
                )
            )
        for i, handle in enumerate(handles):
            demand(handle, f"priority.{i}", 0)

    with job.check("placement changes no sum"):
        for placement in (0, 1, 7):
            name = f"placed.{placement}"
            given = values.exact_input(ELEMENTS, job.rank, name, 0, "float32")
            result = bps.push_pull(given, average=False, name=name, placement=placement)
            values.demand_exact(result, values.exact_sum(ELEMENTS, ranks, name, 0, "float32"))

    with job.check("poll becomes true, then synchronize returns at once"):
        handle = start("polled", 0)
        deadline = time.monotonic() + 30
        while not bps.poll(handle):
            assert time.monotonic() < deadline, "poll stayed false for 30 s"
            time.sleep(0.001)
        demand(handle, "polled", 0)

    with job.check("poll is false while a rank has not called"):
        if job.rank == 0:
            handle = start("late", 0)
            assert bps.poll(handle) is False
            job.mark("polled")
        else:
            deadline = time.monotonic() + 30
            while not (job.folder / "mark.polled.0").exists():
                assert time.monotonic() < deadline
                time.sleep(0.005)
            handle = start("late", 0)
        demand(handle, "late", 0)

    handle = start("twice", 0)
    with job.check("first synchronize"):
        demand(handle, "twice", 0)
    with job.check_raises("second synchronize", ValueError, "handle"):
        bps.synchronize(handle)
    with job.check_raises("poll of a handle that is done with", ValueError, "handle"):
        bps.poll(handle)
    with job.check_raises("a handle that never was", ValueError, "handle"):
        bps.synchronize(1 << 30)

    with job.check("the tensor stays alive without a reference"):
        handle = bps.push_pull_async(
            torch.full((ELEMENTS,), 1.0), average=False, name="unreferenced"
        )
        junk = [torch.full((ELEMENTS,), 9.0) for _ in range(50)]
        values.demand_exact(bps.synchronize(handle), torch.full((ELEMENTS,), float(job.size)))
        del junk
    bps.shutdown()
