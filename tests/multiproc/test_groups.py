"""Sums over some of the ranks, and members that disagree."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from cluster import END_S, Cluster, wait_all


@pytest.mark.parametrize("servers", [1, 3])
def test_groups_under_one_name_do_not_mix(
    make_cluster: Callable[..., Cluster], servers: int
) -> None:
    env = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_OP_TIMEOUT_S": "20"}
    make_cluster(workers=4, servers=servers, env=env).run("groups:disjoint")


@pytest.mark.parametrize("kind", ["size", "partitions", "dtype", "average"])
def test_members_that_disagree(make_cluster: Callable[..., Cluster], kind: str) -> None:
    """Every member gets an error with the key's name and both ranks, long before any timeout."""
    cluster = make_cluster(workers=2, servers=2)
    workers = cluster.start("groups:mismatch", kind=kind)
    wait_all(workers, END_S)
    cluster.demand_checks()
    for rank in range(2):
        text = (cluster.folder / f"mismatch.{rank}").read_text()
        assert "layer.weight" in text
        assert re.search(r"\b0\b", text) and re.search(r"\b1\b", text), text
    wait_all(cluster.servers, END_S)
    assert cluster.scheduler is not None
    cluster.scheduler.wait(END_S)
