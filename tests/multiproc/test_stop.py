"""Servers and schedulers that are told to end: what runs is finished, and everybody learns why."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import END_S, Cluster, Spawned, wait_all
from tests.multiproc.endings import demand_error
from tests.multiproc.test_health import start, wait_for

SHORT = {"BYTEPS_PEER_TIMEOUT_S": "5"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_learn_which_server_was_stopped(
    make_cluster: Callable[..., Cluster], number: signal.Signals
) -> None:
    cluster = make_cluster(workers=2, servers=2, env=SHORT)
    workers = cluster.start("failures:loop")
    cluster.wait_mark("looping", [0, 1])
    cluster.servers[1].send(number)
    wait_all(cluster.everyone(), END_S)
    assert cluster.servers[1].wait(0) == 128 + number
    for worker in workers:
        # Ranks of servers follow the order in which they registered.
        demand_error(worker, rf"server [01] \(.*\) was stopped by {number.name}")
    assert "was stopped by SIG" in cluster.servers[0].text
    assert "was stopped by SIG" in cluster.scheduler.text


def start_half_a_sum(make_cluster: Callable[..., Cluster], **env: str) -> tuple[Cluster, Spawned]:
    """A job of two whose server has one worker's push of a sum, and waits for the other's."""
    cluster = make_cluster(workers=2, servers=1, env={**SHORT, **env})
    cluster.start_scheduler()
    socket = cluster.folder / "health"
    server = start(cluster, "server", "--role", "server", socket=socket)
    cluster.servers.append(server)
    for rank in range(2):
        cluster.start_worker(rank, "observed:drained")
    wait_for(socket, "sums_total=1 ", server)
    wait_for(socket, "open_rounds=1", server)
    return cluster, server


def test_the_sum_under_way_is_finished_first(make_cluster: Callable[..., Cluster]) -> None:
    cluster, server = start_half_a_sum(make_cluster)
    server.send(signal.SIGTERM)
    # Worker 1 has not pushed: the server waits for it.
    cluster.go("push")
    cluster.wait_mark("summed", [0, 1])
    wait_all(cluster.everyone(), END_S)
    assert server.wait(0) == 143
    for rank in range(2):
        demand_error(cluster.workers[f"worker {rank}"], r"server 0 .*stopped by SIGTERM")


@pytest.mark.parametrize("again", [False, True], ids=["the time is up", "a second signal"])
def test_the_wait_has_an_end(make_cluster: Callable[..., Cluster], again: bool) -> None:
    patience = "3000" if again else "0.3"
    cluster, server = start_half_a_sum(make_cluster, BYTEPS_STOP_TIMEOUT_S=patience)
    server.send(signal.SIGTERM)
    while again and server.running:
        time.sleep(0.1)
        server.send(signal.SIGTERM)
    assert server.wait(END_S) == 143
    demand_error(
        cluster.workers["worker 0"],
        r"server 0 .*stopped by SIGTERM before the reductions in flight were complete",
    )
    cluster.go("push")
    wait_all(cluster.everyone(), END_S)


def test_a_scheduler_that_is_stopped_says_so(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=1, servers=1, env=SHORT)
    [worker] = cluster.start("failures:loop")
    cluster.wait_mark("looping", [0])
    cluster.scheduler.send(signal.SIGTERM)
    wait_all(cluster.everyone(), END_S)
    assert cluster.scheduler.wait(0) == 143
    demand_error(worker, r"the scheduler \(.*\) was stopped by SIGTERM")
