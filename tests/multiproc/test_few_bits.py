"""Sums in blocks of eight and four bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.multiproc.cluster import Cluster
from tests.multiproc.test_server_optimizer import demand_same_bits

IN_ORDER = {"BYTEPS_DETERMINISTIC": "1", "BYTEPS_OP_TIMEOUT_S": "120"}


@pytest.mark.parametrize(
    ("workers", "servers"),
    [
        pytest.param(1, 1, marks=pytest.mark.thorough),
        pytest.param(2, 1, marks=pytest.mark.thorough),
        (3, 2),
        pytest.param(3, 4, marks=pytest.mark.thorough),
    ],
)
def test_sums(make_cluster: Callable[..., Cluster], workers: int, servers: int) -> None:
    """The bits do not depend on how many servers there are."""
    make_cluster(workers=workers, servers=servers, env=IN_ORDER).run("few_bits:sums")


@pytest.mark.thorough  # tests/server/accumulator_test.cc has so many, too
def test_sums_of_more_ranks_than_are_added_at_once(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=10, servers=1, env=IN_ORDER).run("few_bits:parts")


@pytest.mark.parametrize("servers", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_sums_that_are_rounded_by_chance(
    make_cluster: Callable[..., Cluster], servers: int
) -> None:
    """The bits do not depend on how many partitions and servers there are."""
    chance = {"BYTEPS_STOCHASTIC_ROUNDING": "1", "BYTEPS_PARTITION_BYTES": "4096"}
    make_cluster(workers=2, servers=servers, env=IN_ORDER | chance).run("few_bits:by_chance")


def test_parts(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=2, env=IN_ORDER).run("few_bits:parts")


def test_what_is_not_finite(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=IN_ORDER).run("few_bits:not_finite")


def test_what_was_lost_can_be_forgotten(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=2, env=IN_ORDER).run("few_bits:forgotten")


def test_losses_are_saved_and_loaded(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=2, env=IN_ORDER).run("few_bits:saved")


@pytest.mark.parametrize("workers", [1, 2])
def test_refusals(make_cluster: Callable[..., Cluster], workers: int) -> None:
    make_cluster(workers=workers, servers=1, env=IN_ORDER).run("few_bits:refused")


@pytest.mark.parametrize(
    ("workers", "servers"),
    [
        (2, 2),
        pytest.param(3, 1, marks=pytest.mark.thorough),
        pytest.param(2, 4, marks=pytest.mark.thorough),
    ],
)
def test_steps_of_the_optimizer_on_the_servers(
    make_cluster: Callable[..., Cluster], workers: int, servers: int
) -> None:
    """The bits do not depend on how many servers there are."""
    env = {**IN_ORDER, "BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_KEEP_BF16_BYTES": "1024"}
    cluster = make_cluster(workers=workers, servers=servers, env=env)
    cluster.run("server_few_bits:steps")
    demand_same_bits(cluster)


def test_what_an_optimizer_on_the_servers_refuses(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=IN_ORDER).run("server_few_bits:refused")
