"""Servers get equal parts of what a step sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.multiproc.cluster import Cluster


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 5, 8])
def test_spread(make_cluster: Callable[..., Cluster], servers: int) -> None:
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
