"""A lost peer ends every process in time with an error that names it, or is replaced, over TCP and
RDMA alike."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import END_S, Cluster, wait_all
from tests.multiproc.endings import demand_error, demand_failed, start_looping
from tests.multiproc.spares import WAIT, start_with_spare, wait_done

PEER_TIMEOUT_S = 4
SHORT = {
    "BYTEPS_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S),
    "BYTEPS_START_TIMEOUT_S": "10",
    "BYTEPS_PARTITION_BYTES": "4096",
}
Make = Callable[..., Cluster]

each = pytest.mark.transports("tcp", "rdma", "rdma-one-plane")
signals = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])


@each
@signals
def test_worker(make_over: Make, number: signal.Signals) -> None:
    cluster = start_looping(make_over, SHORT, workers=3, servers=2)
    cluster.workers["worker 1"].send(number)
    survivors = [cluster.workers["worker 0"], cluster.workers["worker 2"]]
    nodes = [*cluster.servers, cluster.scheduler]
    wait_all([*survivors, *nodes], END_S)
    for worker in survivors:
        demand_error(worker, r"worker 1\b.*lost")
    for node in nodes:
        demand_failed(node, r"worker 1\b.*lost")


@each
@signals
def test_server(make_over: Make, number: signal.Signals) -> None:
    cluster = start_looping(make_over, SHORT, workers=2, servers=2)
    cluster.servers[1].send(number)
    survivors = list(cluster.workers.values())
    wait_all([*survivors, cluster.servers[0], cluster.scheduler], END_S)
    for worker in survivors:
        demand_error(worker, r"server [01]\b.*lost")
    for node in (cluster.servers[0], cluster.scheduler):
        demand_failed(node, r"server [01]\b.*lost")


@each
@signals
def test_scheduler(make_over: Make, number: signal.Signals) -> None:
    cluster = start_looping(make_over, SHORT, workers=2, servers=1)
    cluster.scheduler.send(number)
    survivors = list(cluster.workers.values())
    wait_all([*survivors, *cluster.servers], END_S)
    for worker in survivors:
        demand_error(worker, r"scheduler\b.*lost")
    for server in cluster.servers:
        demand_failed(server, r"scheduler\b.*lost")


@each
def test_no_scheduler_there(make_over: Make) -> None:
    cluster = make_over(workers=1, servers=1, env={**SHORT, "BYTEPS_START_TIMEOUT_S": "3"})
    cluster.port = 9
    worker = cluster.start_worker(0, "failures:init_only")
    server = cluster.start_server()
    wait_all([worker, server], END_S)
    demand_error(worker, r"scheduler.*did not answer.*BYTEPS_START_TIMEOUT_S=3")
    demand_failed(server, r"scheduler.*did not answer.*BYTEPS_START_TIMEOUT_S=3")


@pytest.mark.transports("rdma")
def test_a_lost_server_is_replaced(make_over: Make) -> None:
    cluster = make_over(workers=2, servers=2, env=WAIT)
    training = start_with_spare(cluster, steps=20, pace=0.03)
    wait_done(cluster, 5)
    cluster.servers[0].send(signal.SIGKILL)
    cluster.finish_with(training, [cluster.servers[0]])
