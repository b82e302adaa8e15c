"""Sums over some of the ranks."""

from __future__ import annotations

import byteps.torch as bps
import torch
import torch.distributed as dist

from programs import values
from programs.job import Job

COUNT = 3001


def disjoint(job: Job) -> None:
    """Groups of four workers under one name, at the same time."""
    bps.init()

    def start(group: list[int] | None, round_: int, average: bool, name: str = "shared") -> int:
        given = values.exact_input(COUNT, job.rank, name, round_, "float32")
        return bps.push_pull_async(given, average=average, name=name, group=group)

    def demand(handle: int, group: list[int], round_: int, average: bool) -> None:
        want = values.exact_sum(COUNT, group, "shared", round_, "float32", average)
        limit = values.ulp(want.double(), "float32") * (len(group) == 3)
        values.demand_close_to(bps.synchronize(handle), want.double(), limit)

    everyone = list(range(job.size))
    layouts = {
        "neighbours": [[0, 1], [2, 3]],
        "strided": [[0, 2], [1, 3]],
        "crossed": [[0, 3], [1, 2]],
        "three and one": [[0, 1, 2], [3]],
        "all": [everyone],
    }
    for label, groups in layouts.items():
        mine = next(group for group in groups if job.rank in group)
        for average in (False, True):
            with job.check(f"{label}, {'average' if average else 'sum'}"):
                for round_ in range(3):
                    demand(start(mine, round_, average), mine, round_, average)
    with job.check("all layouts in flight at once under one name"):
        waiting = []
        for round_ in range(3):
            for groups in layouts.values():
                mine = next(group for group in groups if job.rank in group)
                waiting.append((start(mine, round_, False), mine, round_))
        for handle, mine, round_ in reversed(waiting):
            demand(handle, mine, round_, False)
    with job.check("a group of everyone is no group"):
        # Half of the ranks name the group, the others leave it out: it is the same operation.
        demand(start(everyone if job.rank % 2 else None, 7, False), everyone, 7, False)
    with job.check("the order of ranks in a group does not matter"):
        mine = [0, 1] if job.rank < 2 else [2, 3]
        given = mine if job.rank % 2 else mine[::-1]
        demand(start(given, 8, False), mine, 8, False)
    others = [rank for rank in everyone if rank != job.rank][:2]
    for label, group, pattern in (
        ("a group without the caller", others, str(job.rank)),
        ("a rank twice", [job.rank, job.rank], str(job.rank)),
        ("a rank that is not there", [job.rank, 99], "99"),
        ("a negative rank", [job.rank, -1], "-1"),
        ("an empty group", [], "group"),
    ):
        with job.check_raises(label, ValueError, pattern):
            bps.push_pull(torch.ones(3), name="refused", group=group)
    process_groups(job, everyone)
    bps.shutdown()


def process_groups(job: Job, everyone: list[int]) -> None:
    """A torch ProcessGroup names its ranks."""
    dist.init_process_group(
        "gloo", init_method=f"file://{job.folder}/store", rank=job.rank, world_size=job.size
    )
    halves = [[0, 1], [2, 3]]
    made = [dist.new_group(half) for half in halves]
    index = job.rank // 2
    with job.check("a ProcessGroup"):
        given = values.exact_input(COUNT, job.rank, "pg", 0, "float32")
        result = bps.push_pull(given, average=False, name="pg", group=made[index])
        values.demand_exact(result, values.exact_sum(COUNT, halves[index], "pg", 0, "float32"))
    with job.check("the default ProcessGroup"):
        given = values.exact_input(COUNT, job.rank, "world", 0, "float32")
        result = bps.push_pull(given, average=False, name="world", group=dist.group.WORLD)
        values.demand_exact(result, values.exact_sum(COUNT, everyone, "world", 0, "float32"))
    with job.check_raises("a ProcessGroup without the caller", ValueError, str(job.rank)):
        bps.push_pull(torch.ones(3), name="foreign", group=made[1 - index])
    dist.destroy_process_group()


def mismatch(job: Job) -> None:
    """Rank 1 calls differently from rank 0; the error is noted for the test to read."""
    bps.init()
    bps.push_pull(torch.ones(10), average=False, name="agreed")
    given = torch.ones(5000)
    average = False
    if job.rank == 1:
        kind = job.args["kind"]
        if kind == "size":
            given = torch.ones(5001)
        elif kind == "partitions":
            given = torch.ones(50_000)
        elif kind == "dtype":
            given = torch.ones(5000, dtype=torch.int32)
        elif kind == "average":
            average = True
        else:
            raise ValueError(kind)
    with job.check(f"rank {job.rank} is told of the mismatch"):
        try:
            bps.push_pull(given, average=average, name="layer.weight")
        except bps.BytePSError as error:
            job.note("mismatch", str(error))
        else:
            raise AssertionError("no error")
