"""Processes that are forked from a worker neither disturb its job nor hide its end."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import Cluster
from tests.multiproc.endings import demand_error


@pytest.mark.parametrize("env", [{}, {"BYTEPS_TLS": "1"}], ids=["plain", "tls"])
def test_children_cannot_reach_the_job(
    make_cluster: Callable[..., Cluster], env: dict[str, str]
) -> None:
    make_cluster(workers=2, servers=2, env=env).run("forked:children")


def test_data_loaders(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1).run("forked:loads_data")


def test_a_killed_worker_is_noticed_by_its_connection(
    make_cluster: Callable[..., Cluster],
) -> None:
    """Not by its silence, which would take longer than this test waits."""
    cluster = make_cluster(workers=2, servers=1, env={"BYTEPS_PEER_TIMEOUT_S": "3000"})
    workers = cluster.start("forked:killed")
    cluster.wait_mark("sums", (0, 1))
    cluster.wait_mark("child", (1,))
    workers[1].send(signal.SIGKILL)
    demand_error(workers[0], r"worker 1 \(.*\) was lost: its connection closed")
    cluster.go("end")
    cluster.wait_mark("ended", ())
