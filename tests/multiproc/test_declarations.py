"""How tensors are declared, cut and placed, and what members of a group must agree on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.multiproc.cluster import Cluster


def test_many_tensors(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=3, servers=2).run("declare:many")


def test_hash_functions_must_agree(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=2)
    cluster.start_nodes()
    for rank, name in enumerate(("djb2", "raw")):
        cluster.start_worker(rank, "declare:hashed", env={"BYTEPS_KEY_HASH_FN": name})
    cluster.wait_mark("declared", [0])
    cluster.go("second")
    cluster.wait_mark("done", [0, 1])
    cluster.go("end")
    cluster.finish()


def test_parameters_without_names(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2).run("declare:broadcast")


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 5, 8])
def test_spread(make_cluster: Callable[..., Cluster], servers: int) -> None:
    """Servers get equal parts of what a step sums."""
    make_cluster(workers=1, servers=servers).run("placement:spread", servers=servers)


@pytest.mark.parametrize(
    ("rates", "slowest"), [(("25", "100"), 25), (("100", None), 0)], ids=["the-slowest", "unknown"]
)
def test_the_slowest_workers_link_decides(
    make_cluster: Callable[..., Cluster], rates: tuple[str | None, str | None], slowest: int
) -> None:
    """Partitions are as long as it wants them, the same on all workers."""
    cluster = make_cluster(workers=2, servers=1)
    cluster.start_nodes()
    for rank, rate in enumerate(rates):
        env = {} if rate is None else {"BYTEPS_LINK_GBPS": rate}
        cluster.start_worker(rank, "placement:by_link", env=env, slowest=slowest)
    cluster.finish()


def test_the_other_hash(make_cluster: Callable[..., Cluster]) -> None:
    env = {"BYTEPS_KEY_HASH_FN": "djb2"}
    make_cluster(workers=1, servers=3, env=env).run("placement:hashed")
