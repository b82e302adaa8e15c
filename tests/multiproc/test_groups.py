"""Sums over some of the ranks, and members that disagree."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import Cluster


@pytest.mark.parametrize("servers", [1, 3])
def test_groups_under_one_name_do_not_mix(
    make_cluster: Callable[..., Cluster], servers: int
) -> None:
    env = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_OP_TIMEOUT_S": "20"}
    make_cluster(workers=4, servers=servers, env=env).run("groups:disjoint")


@pytest.mark.parametrize("workers", [2, 3])
def test_parts_of_a_sum(make_cluster: Callable[..., Cluster], workers: int) -> None:
    env = {
        "BYTEPS_PARTITION_BYTES": "4096",
        "BYTEPS_OP_TIMEOUT_S": "20",
    }
    make_cluster(workers=workers, servers=2, env=env).run("groups:parts")


@pytest.mark.parametrize("kind", ["size", "partitions", "dtype", "average"])
def test_members_that_disagree(make_cluster: Callable[..., Cluster], kind: str) -> None:
    """Every member gets an error with the key's name and both ranks, long before any timeout."""
    env = {"BYTEPS_PARTITION_BYTES": "4096"}
    cluster = make_cluster(workers=2, servers=2, env=env)
    cluster.run("groups:mismatch", kind=kind)
    for rank in range(2):
        text = (cluster.folder / f"mismatch.{rank}").read_text()
        assert "layer.weight" in text
        assert re.search(r"worker 0\b.*worker 1\b|worker 1\b.*worker 0\b", text), text
