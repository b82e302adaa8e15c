"""The optimizer on the servers: what it computes, what it refuses, and that all ranks agree."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import Cluster

ENV = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_OP_TIMEOUT_S": "60"}


def demand_same_bits(cluster: Cluster) -> None:
    """Of every note, on every rank."""
    names = {path.name.rsplit(".", 1)[0] for path in cluster.folder.glob("bits.*")}
    assert names
    for name in names:
        found = {
            (cluster.folder / f"{name}.{rank}").read_text()
            for rank in range(cluster.workers_wanted)
        }
        assert len(found) == 1, name


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (4, 3)])
def test_steps(make_cluster: Callable[..., Cluster], workers: int, servers: int) -> None:
    cluster = make_cluster(workers=workers, servers=servers, env=ENV)
    cluster.run("server_optimizer:updates", device="cpu")
    demand_same_bits(cluster)


def test_clipping(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=2, env=ENV)
    cluster.run("server_optimizer:clipped", device="cpu")
    demand_same_bits(cluster)


def test_steps_that_are_tried(make_cluster: Callable[..., Cluster]) -> None:
    """Before it is known whether they are clipped."""
    cluster = make_cluster(workers=2, servers=2, env=ENV)
    cluster.run("server_optimizer:speculates", device="cpu")
    demand_same_bits(cluster)


def test_tensors_live_as_long_as_they_are_used(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=ENV).run("server_optimizer:keeps_memory")


def test_a_step_that_is_interrupted(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=ENV).run("server_optimizer:interrupted", device="cpu")


def test_a_state_that_does_not_fit(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=ENV).run("server_optimizer:loads", device="cpu")


def test_two_of_one_name(make_cluster: Callable[..., Cluster]) -> None:
    """The second is refused, on all ranks, where any of them still uses the first."""
    make_cluster(workers=3, servers=2, env=ENV).run("server_optimizer:names", servers=2)


def test_members_that_disagree(make_cluster: Callable[..., Cluster]) -> None:
    """On a learning rate: all are told where servers update at once, else at least the second."""
    cluster = make_cluster(workers=2, servers=1, env=ENV)
    cluster.run("server_optimizer:disagree")
    told = {path.name: path.read_text() for path in cluster.folder.glob("disagree.*")}
    assert {"disagree.None.0", "disagree.None.1"} <= set(told)
    assert any(name.startswith("disagree.1.0") for name in told)
    for text in told.values():
        assert re.search(
            r"disagree on a step .*rates 0\.5.*rates 1\.5|rates 1\.5.*rates 0\.5", text
        )


def test_what_is_refused(make_cluster: Callable[..., Cluster]) -> None:
    env = {**ENV, "BYTEPS_SERVER_STATE_BYTES": "40000"}
    make_cluster(workers=2, servers=1, env=env).run("server_optimizer:refused")
