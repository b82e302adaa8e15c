"""Programs with several process groups of the same ranks, in every order of use and destruction."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import byteps.torch as bps
import torch
import torch.distributed as dist
from byteps import c10d_plugin
from byteps.torch.c10d import hooks

from tests.multiproc.programs.c10d_kit import (
    LARGE,
    given,
    init_process_group,
    initialize,
    natively,
    tcp_store,
    through_servers,
    total,
)
from tests.multiproc.programs.job import Job

ROUNDS = 10
WAIT_S = 100.0

type Reduce = Callable[[torch.Tensor, Any], None]


def _by_group(tensor: torch.Tensor, group: Any) -> None:
    dist.all_reduce(tensor, group=group)


def _by_hook(tensor: torch.Tensor, group: Any) -> None:
    hooks.fsdp_all_reduce_hook(group)(tensor)
    tensor.mul_(group.size())


def _demand_sums(job: Job, group: Any, factor: int, reduce: Reduce = _by_group) -> None:
    """Check several sums of the same length, with values that no other group has."""
    want = total(LARGE, dist.get_process_group_ranks(group))
    for round_ in range(ROUNDS):
        tensor = given(LARGE, job.rank) * factor + round_
        reduce(tensor, group)
        # An average is not exact.
        torch.testing.assert_close(tensor, want * factor + round_ * group.size())


def _in_opposite_order(job: Job, groups: list[Any], reduce: Reduce = _by_group) -> None:
    """Sum in a thread per group. Odd ranks begin with the last group."""
    order = list(enumerate(groups, 1))
    if job.rank % 2:
        order.reverse()
    began = [threading.Event() for _ in order]
    errors: list[BaseException] = []

    def use(turn: int, number: int, group: Any) -> None:
        try:
            # The other thread must have asked for its first sum, which the other rank does not
            # expect yet.
            if turn:
                assert began[turn - 1].wait(WAIT_S)
                time.sleep(0.3)
            began[turn].set()
            _demand_sums(job, group, 10**number, reduce)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=use, args=(turn, number, group))
        for turn, (number, group) in enumerate(order)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def groups(job: Job) -> None:
    """Groups created by the backend."""
    initialize(job, store=tcp_store(job))
    everyone = list(range(job.size))
    before = through_servers()
    with job.check("two groups, first used in opposite order"):
        _in_opposite_order(job, [dist.new_group(everyone), dist.new_group(everyone)])
    with job.check("short tensors of one group alone"):
        short, other = dist.new_group(everyone), dist.new_group(everyone)
        few = torch.ones(3)
        dist.all_reduce(few, group=short)
        _demand_sums(job, other, 2)
        _demand_sums(job, short, 3)
    with job.check("one rank destroys a group earlier"):
        old, other = dist.new_group(everyone), dist.new_group(everyone)
        _demand_sums(job, old, 4)
        if job.rank == 0:
            dist.destroy_process_group(old)
        _demand_sums(job, other, 5)
        if job.rank != 0:
            dist.destroy_process_group(old)
        _demand_sums(job, other, 6)
    with job.check("all went through servers"):
        assert through_servers() >= before + 7 * ROUNDS
    dist.destroy_process_group()


def remade(job: Job) -> None:
    """A group is destroyed and created again, at different times on each rank."""
    initialize(job)
    everyone, remakes = list(range(job.size)), int(job.args["remakes"])
    with job.check("a group is made again and again"):
        group_left = dist.new_group(everyone)
        for number in range(remakes):
            group = dist.new_group(everyone)
            before = through_servers()
            tensor = given(LARGE, job.rank) + number
            dist.all_reduce(tensor, group=group)
            assert torch.equal(tensor, total(LARGE, everyone) + number * job.size)
            assert through_servers() > before
            if number % 20 == job.rank:
                time.sleep(0.05)
                gc.collect()
            if number % 3 == job.rank:
                dist.all_reduce(tensor.clone(), group=group_left)
                dist.destroy_process_group(group)
            else:
                dist.destroy_process_group(group)
                dist.all_reduce(tensor.clone(), group=group_left)
    dist.destroy_process_group()


def hooked(job: Job) -> None:
    """Groups of plain gloo, which the hooks use."""
    c10d_plugin.register()
    bps.init()
    init_process_group(job, store=tcp_store(job))
    everyone = list(range(job.size))
    with job.check("two groups, first used in opposite order"):
        _in_opposite_order(job, [dist.new_group(everyone), dist.new_group(everyone)], _by_hook)
    with job.check("a group that is made again, and collected on one rank alone"):
        groups_made: list[Any] = []
        for number in range(4):
            group = dist.new_group(everyone)
            _demand_sums(job, group, number + 1, _by_hook)
            dist.destroy_process_group(group)
            if job.rank == 0:
                groups_made.append(group)
            del group
            gc.collect()
    dist.destroy_process_group()
    with job.check("another default group, whose groups have the same names"):
        init_process_group(job, init_method=f"file://{job.folder}/again")
        _in_opposite_order(job, [dist.new_group(everyone), dist.new_group(everyone)], _by_hook)
        dist.destroy_process_group()
    bps.shutdown()


def node_first(job: Job) -> None:
    """Sum on hosts first. Sums of the node groups of different process groups must not mix
    either."""
    initialize(job, store=tcp_store(job))
    everyone = list(range(job.size))
    with job.check("two groups, first used in opposite order"):
        _in_opposite_order(job, [dist.new_group(everyone), dist.new_group(everyone)])
    with job.check("groups whose first rank, which the others ask, differs"):
        mirrored = dist.new_group(everyone[::-1], sort_ranks=False)
        _in_opposite_order(job, [dist.new_group(everyone), mirrored])
    with job.check("groups of the hook"):
        with natively():
            pair = [dist.new_group(everyone), dist.new_group(everyone)]
        _in_opposite_order(job, pair, _by_hook)
    dist.destroy_process_group()
