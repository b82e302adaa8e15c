"""Process groups of the same ranks: each has its own sums, in any order of use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.multiproc.cluster import Cluster
from tests.multiproc.test_c10d import FLAT

# Without this limit, sums of two groups that met would wait for ever.
SOON = {**FLAT, "BYTEPS_OP_TIMEOUT_S": "30"}


def test_groups_keep_their_sums_apart(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=SOON).run("c10d_groups:groups")


@pytest.mark.parametrize("remakes", [40, pytest.param(200, marks=pytest.mark.thorough)])
def test_a_group_is_destroyed_and_made_again(
    make_cluster: Callable[..., Cluster], remakes: int
) -> None:
    make_cluster(workers=2, servers=1, env=SOON).run("c10d_groups:remade", remakes=remakes)


def test_groups_of_the_hooks_keep_their_sums_apart(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=SOON).run("c10d_groups:hooked")


def test_ranks_of_a_host_keep_groups_apart(make_cluster: Callable[..., Cluster]) -> None:
    env = {**SOON, "BYTEPS_C10D_BACKEND": "node-first"}
    make_cluster(workers=4, servers=1, env=env).run("c10d_groups:node_first", per_host=2)
