"""What a plan and a push cost grows with the number of ranks, and not with its square.

How long they take is held against thresholds by bench/planning/run.py; here operations are counted.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from byteps.torch import engine, nodes
from byteps.torch import ranks as rank_groups
from megatron.core.distributed.dpu_reduce import job, plan

from bench.planning.made_up import MadeUp

looks = 0
"""At numbers of ranks and hosts: comparisons, and look-ups in sets and dictionaries."""


class Counted(int):
    """A number that tells when it is looked at."""

    def __eq__(self, other: object) -> bool:
        global looks
        looks += 1
        return int(self) == other

    def __lt__(self, other: int) -> bool:
        global looks
        looks += 1
        return int(self) < other

    def __hash__(self) -> int:
        global looks
        looks += 1
        return hash(int(self))


def planned(ranks: int, instances: int) -> tuple[int, Any]:
    """Looks that a plan takes, and the model that it is of."""
    global looks
    made_up = MadeUp(ranks=ranks, per_host=4, groups=3, elements=64 * ranks, instances=instances)
    model = made_up.model()
    for group in (model.dp_cp_group, model.buffers[0].data_parallel_group):
        group.ranks = [Counted(rank) for rank in group.ranks]
    with made_up.joined(), contextlib.redirect_stdout(io.StringIO()):
        assert job._job is not None
        job._job = replace(job._job, hosts=tuple(Counted(host) for host in job._job.hosts))
        looks = 0
        plan.register(model)
        return looks, model


@pytest.mark.parametrize("optimizer", ["whole", "sharded", "sharded in each host"])
def test_a_plan_looks_at_each_rank_a_few_times(optimizer: str) -> None:
    counts = []
    for ranks in (256, 512):
        instances = {"whole": 0, "sharded": 1}.get(optimizer, ranks // 4)
        counts.append(planned(ranks, instances)[0])
    assert counts[1] < 2.5 * counts[0], counts
    assert counts[1] < 512 * 3 * 100, counts


def test_a_push_of_a_known_group_does_not_look_at_its_ranks() -> None:
    made_up = MadeUp(ranks=4096, per_host=1, groups=1, elements=4096)
    group, tensor = tuple(range(4096)), torch.zeros(8)
    with (
        made_up.joined(),
        mock.patch.object(rank_groups, "ranks_of", wraps=rank_groups.ranks_of) as walked,
    ):
        for _ in range(50):
            engine.start(
                *(tensor, tensor),
                average=False,
                name="bucket",
                priority=0,
                group=group,
                placement=0,
            )
    assert walked.call_count == 1


def test_a_group_that_may_change_is_looked_at_each_time() -> None:
    group = [0, 1]
    assert len(rank_groups.engine_ranks(group)) == 2
    group.append(2)
    assert len(rank_groups.engine_ranks(group)) == 3
    known = rank_groups.RanksCache()
    for count in range(1, 2 * known.MOST):
        assert len(known.ranks(tuple(range(count)))) == count
    assert len(known._known) == known.MOST


def test_a_sum_inside_hosts_knows_what_it_pushes() -> None:
    made_up = MadeUp(ranks=64, per_host=4, groups=1, elements=64 * 64)
    model = made_up.model()
    with made_up.joined(), contextlib.redirect_stdout(io.StringIO()):
        plan.register(model)
        node_sum = model.buffers[0].buckets[0].dpu_reduce_op.node_whole
        assert isinstance(node_sum, nodes.NodeSum)
        first = node_sum.pushes(5, 4)
        assert node_sum.pushes(5, 4) is first
        assert {push.group for push in first} == {tuple(range(1, 64, 4))}
        assert len({id(push.group) for push in first}) == 1
        assert node_sum.pushes(6, 4) != first
