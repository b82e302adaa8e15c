"""Asynchronous handles, and names declared and used in every order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import byteps.torch as bps
import torch

from tests.multiproc.programs import values
from tests.multiproc.programs.job import Job

COUNT = 5000  # several partitions of a page


def every_order(job: Job) -> None:
    bps.init()
    ranks = list(range(job.size))

    def start(name: str, round_: int) -> int:
        given = values.exact_input(COUNT, job.rank, name, round_, "float32")
        return bps.push_pull_async_inplace(given, average=False, name=name)

    def demand(handle: int, name: str, round_: int) -> None:
        want = values.exact_sum(COUNT, ranks, name, round_, "float32")
        values.demand_exact(bps.synchronize(handle), want)

    # Each rank waits in an order of its own.
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
            given = values.exact_input(COUNT, job.rank, f"priority.{i}", 0, "float32")
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
            given = values.exact_input(COUNT, job.rank, name, 0, "float32")
            result = bps.push_pull(given, average=False, name=name, placement=placement)
            values.demand_exact(result, values.exact_sum(COUNT, ranks, name, 0, "float32"))

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
        handle = bps.push_pull_async(torch.full((COUNT,), 1.0), average=False, name="unreferenced")
        junk = [torch.full((COUNT,), 9.0) for _ in range(50)]
        values.demand_exact(bps.synchronize(handle), torch.full((COUNT,), float(job.size)))
        del junk
    bps.shutdown()
