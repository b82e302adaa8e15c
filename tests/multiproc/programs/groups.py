"""Sums over some of the ranks."""

from __future__ import annotations

import byteps.torch as bps
import torch
import torch.distributed as dist

from tests.multiproc.programs import values
from tests.multiproc.programs.job import Job

COUNT = 3001


def disjoint(job: Job) -> None:
    """Groups of four workers under one name, at the same time."""
    bps.init()

    def start(name: str, group: list[int] | None, round_: int, average: bool = False) -> int:
        given = values.exact_input(COUNT, job.rank, name, round_, "float32")
        return bps.push_pull_async(given, average=average, name=name, group=group)

    def demand(
        handle: int, name: str, group: list[int], round_: int, average: bool = False
    ) -> None:
        want = values.exact_sum(COUNT, group, name, round_, "float32", average)
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
    # The groups of a layout share the name; each rank takes part through one of them.
    mine = {
        label: next(group for group in groups if job.rank in group)
        for label, groups in layouts.items()
    }
    for label, group in mine.items():
        for average in (False, True):
            name = f"{label}, {'average' if average else 'sum'}"
            with job.check(name):
                for round_ in range(3):
                    demand(start(name, group, round_, average), name, group, round_, average)
    with job.check("all layouts in flight at once"):
        waiting = [
            (start(f"{label}, sum", group, round_), f"{label}, sum", group, round_)
            for round_ in range(3, 6)
            for label, group in mine.items()
        ]
        for handle, name, group, round_ in reversed(waiting):
            demand(handle, name, group, round_)
    with job.check("a group of everyone is no group"):
        # Half of the ranks name the group, the others leave it out: it is the same operation.
        name = "everyone"
        demand(start(name, everyone if job.rank % 2 else None, 7), name, everyone, 7)
    with job.check("the order of ranks in a group does not matter"):
        name, group = "order", mine["neighbours"]
        demand(start(name, group if job.rank % 2 else group[::-1], 8), name, group, 8)
    with job.check("a name stays with its group"):
        # Rank 0 used it with [0, 1]: the key of [0, 2] would be the same.
        if job.rank == 0:
            try:
                start("neighbours, sum", [0, 2], 0)
            except ValueError as error:
                assert "neighbours, sum" in str(error), str(error)
            else:
                raise AssertionError("was accepted")
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
    """Rank 1 calls differently from rank 0: both are told, and the job can go on."""
    bps.init()
    bps.push_pull(torch.ones(10), average=False, name="agreed")
    # Thousands of partitions: most are not sent yet when the error comes.
    given = torch.ones(3_000_000)
    average = False
    if job.rank == 1:
        kind = job.args["kind"]
        if kind == "size":
            given = torch.ones(3_000_001)
        elif kind == "partitions":
            given = torch.ones(4_000_000)
        elif kind == "dtype":
            given = torch.ones(3_000_000, dtype=torch.int32)
        elif kind == "average":
            average = True
        else:
            raise ValueError(kind)
    with job.check("told of the mismatch"):
        try:
            bps.push_pull(given, average=average, name="layer.weight")
        except bps.BytePSError as error:
            job.note("mismatch", str(error))
        else:
            raise AssertionError("no error")
    # The memory goes back to the system; nothing may read or write it any more.
    del given
    with job.check("other tensors are still summed"):
        for round_ in range(3):
            want = values.exact_sum(10, [0, 1], "agreed", round_, "float32")
            given = values.exact_input(10, job.rank, "agreed", round_, "float32")
            values.demand_exact(bps.push_pull(given, average=False, name="agreed"), want)
    bps.shutdown()


def parts(job: Job) -> None:
    """Each rank wants another part of the sum, within, across and outside of partitions."""
    bps.init()
    everyone = list(range(job.size))
    shard = COUNT // job.size
    ranges = {
        "shard": (job.rank * shard, (job.rank + 1) * shard),
        "inside a partition": (5 + job.rank, 9),
        "across partitions": (1000, 2100 + job.rank),
        "one element": (COUNT - 1 - job.rank, COUNT - job.rank),
        "nothing": (7, 7),
        "all": (0, COUNT),
        # Only some of the members want something.
        "one rank": (0, COUNT if job.rank == 0 else 0),
    }
    for dtype in ("float32", "bfloat16"):
        for label, (begin, end) in ranges.items():
            name = f"{label}, {dtype}"
            with job.check(name):
                for round_ in range(3):
                    given = values.exact_input(COUNT, job.rank, name, round_, dtype)
                    want = values.exact_sum(COUNT, everyone, name, round_, dtype, False)
                    got = given.clone()
                    bps.push_pull_inplace(got, average=False, name=name, pull=(begin, end))
                    assert torch.equal(got[begin:end], want[begin:end])
                    assert torch.equal(got[:begin], given[:begin]), "touched what is before"
                    assert torch.equal(got[end:], given[end:]), "touched what is behind"
    for wrong in ((-1, 4), (5, 4), (0, COUNT + 1)):
        with job.check(f"the range {wrong}"):
            try:
                bps.push_pull_inplace(torch.zeros(COUNT), name="wrong", pull=wrong)
            except ValueError as error:
                assert str(wrong) in str(error)
            else:
                raise AssertionError("it was taken")
