"""push_pull over all ranks and over groups, compared with closed forms and float64 sums."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import byteps.torch as bps
import torch
import torch.distributed as dist

from tests.multiproc.programs import values
from tests.multiproc.programs.job import Job


def counts(dtype: str, partition_bytes: int) -> dict[str, int]:
    """Return sizes, in elements, around partition boundaries."""
    page = mmap.PAGESIZE
    partition = -(-partition_bytes // page) * page // values.dtype_of(dtype).itemsize
    return {
        "one": 1,
        "odd": 7,
        "partition-1": partition - 1,
        "partition": partition,
        "partition+1": partition + 1,
        "many": 33 * partition + 5,
    }


def every_dtype(job: Job) -> None:
    """Exact sums and averages of every dtype and size, and random sums within their error bound."""
    bps.init()
    with job.check("rank and size"):
        assert (bps.rank(), bps.size()) == (job.rank, job.size)
        assert (bps.local_rank(), bps.local_size()) == (job.rank, job.size)
        assert bps.is_initialized()
    with job.check("partition_bytes"):
        largest = -(-job.args["partition_bytes"] // mmap.PAGESIZE) * mmap.PAGESIZE
        for nbytes in (1, largest, 1 << 30):
            assert bps.partition_bytes(nbytes) == largest
    for dtype in job.args.get("dtypes", values.DTYPES):
        for label, count in counts(dtype, job.args["partition_bytes"]).items():
            with job.check(f"sum {dtype} {label}"):
                exact(job, f"sum.{dtype}.{label}", count, dtype, average=False)
            with job.check(f"average {dtype} {label}"):
                exact(job, f"average.{dtype}.{label}", count, dtype, average=True)
    for dtype in values.FLOATS:
        count = counts(dtype, job.args["partition_bytes"])["many"]
        for average in (False, True):
            name = f"random {dtype} {'average' if average else 'sum'}"
            with job.check(name):
                random(job, name, count, dtype, average)
    bps.shutdown()
    with job.check("shutdown"):
        assert not bps.is_initialized()


def exact(job: Job, name: str, count: int, dtype: str, average: bool) -> None:
    """Four rounds of the same name, one for each function."""
    ranks = list(range(job.size))
    ways: tuple[Callable[..., Any], ...]
    ways = (bps.push_pull, bps.push_pull_inplace, bps.push_pull_async, bps.push_pull_async_inplace)
    for round_, way in enumerate(ways):
        given = values.exact_input(count, job.rank, name, round_, dtype)
        before = given.clone()
        result = way(given, average=average, name=name)
        if way in (bps.push_pull_async, bps.push_pull_async_inplace):
            result = bps.synchronize(result)
        want = values.exact_sum(count, ranks, name, round_, dtype, average)
        if dtype in ("float32", "float64") and average and job.size == 3:
            # torch may divide by three as a product with the rounded third, which is one ulp off.
            limit = values.ulp(want.double(), dtype)
            values.demand_close_to(result, want.double(), limit)
        else:
            values.demand_exact(result, want)
        inplace = way in (bps.push_pull_inplace, bps.push_pull_async_inplace)
        assert (result.data_ptr() == given.data_ptr()) == inplace, f"{way.__name__}: which tensor?"
        if not inplace:
            values.demand_exact(given, before)


def random(job: Job, name: str, count: int, dtype: str, average: bool) -> None:
    for round_ in range(2):
        inputs = [values.random_input(count, rank, name, round_, dtype) for rank in range(job.size)]
        result = bps.push_pull(inputs[job.rank].clone(), average=average, name=name)
        wide = os.environ.get("BYTEPS_SERVER_WIDE_FLOAT32") != "0"
        values.demand_rounded_sum(result, inputs, dtype, average, wide)


def integers(job: Job) -> None:
    """Average integers whose sum exceeds their type."""
    bps.init()
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        for end in (torch.iinfo(dtype).max, torch.iinfo(dtype).min):
            with job.check(f"{dtype}, {end}"):
                # Towards zero, by a different step on each rank.
                step = -5 if end > 0 else 5
                given = [end + step * rank for rank in range(job.size)]
                tensor = torch.full((33,), given[job.rank], dtype=dtype)
                bps.push_pull_inplace(tensor, average=True, name=f"{dtype} {end}")
                assert tensor.tolist() == [sum(given) // job.size] * 33
    bps.shutdown()


def large(job: Job) -> None:
    """Many megabytes, with a partial last partition, in several rounds."""
    bps.init()
    largest = int(os.environ.get("BYTEPS_PARTITION_BYTES", "4096000"))
    with job.check("64 partitions for each of two servers, within limits"):
        for nbytes in (1, 10_000_000, 64 << 20, 100_000_001, 1 << 30):
            smallest = min(131_072, largest)
            pages = -(-(nbytes // 128) // mmap.PAGESIZE)
            wanted = min(max(pages * mmap.PAGESIZE, smallest), largest)
            assert bps.partition_bytes(nbytes) == wanted, nbytes
            assert bps.partition_count(nbytes) == -(-nbytes // wanted), nbytes
    for dtype, count in (("float32", 1_100_001), ("bfloat16", 3_000_003), ("uint8", 4_200_001)):
        with job.check(f"large {dtype}"):
            exact(job, f"large.{dtype}", count, dtype, average=False)
    bps.shutdown()


def wire(job: Job) -> None:
    """Tensors that travel in a half type, and tensors that cannot."""
    bps.init()
    ranks = list(range(job.size))
    count = 5003
    for dtype in ("float32", "float64"):
        for half in ("bfloat16", "float16"):
            half_dtype = values.dtype_of(half)
            name = f"{dtype} as {half}"
            with job.check(f"{name}, exact"):
                for round_ in range(2):
                    given = values.exact_input(count, job.rank, name, round_, dtype)
                    want = values.exact_sum(count, ranks, name, round_, dtype)
                    bps.push_pull_inplace(given, average=False, name=name, wire_dtype=half_dtype)
                    values.demand_exact(given, want)
            with job.check(f"{name}, rounded before and after"):
                inputs = [values.random_input(count, r, name, 0, dtype) for r in ranks]
                summed = inputs[job.rank].clone()
                random_name = f"{name}, random"
                bps.push_pull_inplace(summed, name=random_name, wire_dtype=half_dtype)
                assert torch.equal(summed.to(half_dtype).to(summed.dtype), summed)
                rounded = [given.to(half_dtype) for given in inputs]
                values.demand_rounded_sum(summed, rounded, half, average=True)
            with job.check(f"{name}, a part"):
                given = values.exact_input(count, job.rank, name, 3, dtype)
                got, part = given.clone(), (17, 4000 + job.rank)
                handle = bps.push_pull_async_inplace(
                    got, average=False, name=f"{name}, part", pull=part, wire_dtype=half_dtype
                )
                bps.synchronize(handle)
                want = given.clone()
                total = values.exact_sum(count, ranks, name, 3, dtype)
                want[slice(*part)] = total[slice(*part)]
                values.demand_exact(got, want)
    with job.check("the tensor's own type is no other"):
        given = torch.full((9,), 1 + 2.0**-20)
        bps.push_pull_inplace(given, average=False, name="own", wire_dtype=torch.float32)
        assert (given == job.size * (1 + 2.0**-20)).all()
    for label, given, wire_dtype in (
        ("an integer tensor", torch.ones(4, dtype=torch.int32), torch.bfloat16),
        ("a half tensor", torch.ones(4, dtype=torch.float16), torch.bfloat16),
        ("an integer wire", torch.ones(4), torch.int8),
    ):
        with job.check_raises(label, ValueError, str(wire_dtype)):
            bps.push_pull_inplace(given, name="refused", wire_dtype=wire_dtype)
    if job.size > 1:
        wanted = torch.bfloat16 if job.rank == 1 else None
        with job.check_raises("members that disagree", bps.BytePSError, "float32.*bfloat16|bf.*fl"):
            bps.push_pull_inplace(torch.ones(4096), name="mixed", wire_dtype=wanted)
    bps.shutdown()


def shapes(job: Job) -> None:
    """Tensors that are not plain vectors, and refused tensors."""
    bps.init()
    ranks = list(range(job.size))
    with job.check("2-D"):
        given = values.exact_input(60, job.rank, "2-D", 0, "float32").reshape(12, 5)
        want = values.exact_sum(60, ranks, "2-D", 0, "float32").reshape(12, 5)
        values.demand_exact(bps.push_pull(given, average=False, name="2-D"), want)
    with job.check("0-D"):
        result = bps.push_pull(torch.tensor(float(job.rank + 1)), average=False, name="0-D")
        assert result.shape == ()
        assert result.item() == sum(range(1, job.size + 1))
    with job.check("a view with an offset"):
        base = torch.full((100,), -1.0)
        base[30:70] = values.exact_input(40, job.rank, "view", 0, "float32")
        bps.push_pull_inplace(base[30:70], average=False, name="view")
        values.demand_exact(base[30:70], values.exact_sum(40, ranks, "view", 0, "float32"))
        assert (base[:30] == -1).all() and (base[70:] == -1).all(), "wrote outside the view"
    bps.push_pull(torch.ones(8), average=False, name="fixed")
    for label, given, average in (
        ("another size", torch.ones(9), False),
        ("another dtype", torch.ones(8, dtype=torch.int32), False),
        ("average after sum", torch.ones(8), True),
    ):
        with job.check_raises(f"{label} under a name in use", ValueError, "fixed"):
            bps.push_pull(given, average=average, name="fixed")
    with job.check("average is the default"):
        given = torch.full((3,), float(2 * job.rank))
        want = torch.full((3,), float(sum(2 * rank for rank in ranks)) / job.size)
        assert torch.allclose(bps.push_pull(given, name="default"), want)
    with job.check("requires_grad is left alone"):
        given = torch.ones(5, requires_grad=True)
        result = bps.push_pull(given.detach(), average=False, name="detached")
        values.demand_exact(result, torch.full((5,), float(job.size)))
    with job.check("an empty tensor returns at once"):
        # One rank alone makes these calls: no value is sent, and no rank is waited for.
        if job.rank == 0:
            assert bps.push_pull(torch.empty(0), name="empty").shape == (0,)
            assert bps.push_pull_inplace(torch.empty(0, 3), name="empty").shape == (0, 3)
            handle = bps.push_pull_async(torch.empty(0), name="empty")
            assert bps.poll(handle) is True
            assert bps.synchronize(handle).shape == (0,)
    with job.check_raises("not contiguous", ValueError, "contiguous"):
        bps.push_pull(torch.ones(4, 6).t(), name="transposed")
    with job.check_raises("not contiguous, inplace", ValueError, "contiguous"):
        bps.push_pull_async_inplace(torch.ones(10)[::2], name="strided")
    for dtype in (torch.complex64, torch.bool, torch.int16):
        with job.check_raises(f"{dtype}", (ValueError, TypeError), str(dtype).split(".")[1]):
            bps.push_pull(torch.ones(3).to(dtype), name=f"bad {dtype}")
    with job.check_raises("not a tensor", (ValueError, TypeError), ""):
        bps.push_pull([1.0, 2.0], name="list")
    with job.check_raises("no name", (ValueError, TypeError), "name"):
        bps.push_pull(torch.ones(3), name="")
    with job.check("works after what was refused"):
        values.demand_exact(
            bps.push_pull(torch.ones(3), average=False, name="after"),
            torch.full((3,), float(job.size)),
        )
    bps.shutdown()


# Sums over groups of ranks.


COUNT = 3001


def disjoint(job: Job) -> None:
    """Groups of four workers with the same name, at the same time."""
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
    # All groups of a layout share a name; each rank is in one of them.
    own_groups = {
        label: next(group for group in groups if job.rank in group)
        for label, groups in layouts.items()
    }
    for label, group in own_groups.items():
        for average in (False, True):
            name = f"{label}, {'average' if average else 'sum'}"
            with job.check(name):
                for round_ in range(3):
                    demand(start(name, group, round_, average), name, group, round_, average)
    with job.check("all layouts in flight at once"):
        waiting = [
            (start(f"{label}, sum", group, round_), f"{label}, sum", group, round_)
            for round_ in range(3, 6)
            for label, group in own_groups.items()
        ]
        for handle, name, group, round_ in reversed(waiting):
            demand(handle, name, group, round_)
    with job.check("a group of everyone is no group"):
        # Half of the ranks pass the group of all ranks, the others none: it is the same operation.
        name = "everyone"
        demand(start(name, everyone if job.rank % 2 else None, 7), name, everyone, 7)
    with job.check("the order of ranks in a group does not matter"):
        name, group = "order", own_groups["neighbours"]
        demand(start(name, group if job.rank % 2 else group[::-1], 8), name, group, 8)
    with job.check("a name stays with its group"):
        # Rank 0 has used it with [0, 1]: the key of [0, 2] would be the same.
        if job.rank == 0:
            try:
                start("neighbours, sum", [0, 2], 0)
            except ValueError as error:
                assert "neighbours, sum" in str(error), str(error)
            else:
                raise AssertionError("push_pull accepted another group for the same name")
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
    """A torch ProcessGroup as a group."""
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
    """Make calls that differ between rank 1 and rank 0: both get an error, and the job goes on."""
    bps.init()
    bps.push_pull(torch.ones(10), average=False, name="agreed")
    # With thousands of partitions, most are not sent yet when the error comes.
    other: dict[str, torch.Tensor] = {
        "size": torch.ones(3_000_001),
        "partitions": torch.ones(4_000_000),
        "dtype": torch.ones(3_000_000, dtype=torch.int32),
        "average": torch.ones(3_000_000),
    }
    for kind in list(other):
        given = other.pop(kind) if job.rank == 1 else torch.ones(3_000_000)
        average = job.rank == 1 and kind == "average"
        with job.check(f"told of another {kind}"):
            try:
                bps.push_pull(given, average=average, name=f"layer.weight.{kind}")
            except bps.BytePSError as error:
                job.note(f"mismatch.{kind}", str(error))
            else:
                raise AssertionError(f"push_pull accepted another {kind}")
        # The memory is returned to the system; nothing may access it any more.
        del given
        with job.check(f"after another {kind} other tensors are still summed"):
            for round_ in range(3):
                want = values.exact_sum(10, [0, 1], "agreed", round_, "float32")
                given = values.exact_input(10, job.rank, "agreed", round_, "float32")
                values.demand_exact(bps.push_pull(given, average=False, name="agreed"), want)
    bps.shutdown()


def far_ahead(job: Job) -> None:
    """Rank 0 begins more sums of a name than servers keep rounds, before rank 1 begins any."""
    bps.init()
    rounds = 2_100
    given = [torch.tensor([float(3 * round_ + job.rank)]) for round_ in range(rounds)]
    if job.rank == 1:
        job.wait_go("begin")
    handles = [bps.byteps_push_pull(summed, False, "shared") for summed in given]
    if job.rank == 0:
        job.mark("begun")
    with job.check("all sums"):
        for round_, handle in enumerate(handles):
            assert bps.synchronize(handle).item() == 6 * round_ + 1, round_
    bps.shutdown()


def in_order(job: Job) -> None:
    """Sum in order, with rank 1 last. The rounding of 2^80 + 1 depends on the order."""
    bps.init()
    given = torch.tensor([2.0**80, 1.0, -(2.0**80)][job.rank]).repeat(COUNT)
    for name, in_order in (("as they come", False), ("in the order of ranks", True)):
        bps.declare(
            [
                bps.TensorDeclaration(
                    name=name,
                    dtype=torch.float32,
                    numel=COUNT,
                    average=False,
                    in_order=in_order,
                )
            ]
        )
        if job.rank == 1:
            job.wait_go(name)
        handle = bps.byteps_push_pull(given.clone(), False, name, in_order=in_order)
        if job.rank != 1:
            job.mark(name)
        with job.check(name):
            total = bps.synchronize(handle)
            assert not in_order or torch.equal(total, torch.zeros(COUNT)), total
    with job.check_raises("what was declared", ValueError, "in the order of ranks"):
        bps.push_pull(given, average=False, name="in the order of ranks")
    bps.shutdown()


def parts(job: Job) -> None:
    """Each rank pulls another part of the sum, within, across and outside of partitions."""
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
        # One member pulls values, the others none.
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
                raise AssertionError(f"push_pull accepted the range {wrong}")
