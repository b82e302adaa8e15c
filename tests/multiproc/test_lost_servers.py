"""Servers that are lost while others wait for their places: the job goes on, all sums right."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import RUN_S, Cluster
from tests.multiproc.spares import WAIT, start_with_spare, wait_done, wait_for_text

COPIED = "has a copy of this server's state"


@pytest.mark.parametrize("workers", [2, 3])
def test_spares_take_the_places_of_two(make_cluster: Callable[..., Cluster], workers: int) -> None:
    cluster = make_cluster(workers=workers, servers=2, env=WAIT)
    training = start_with_spare(cluster, steps=60, pace=0.03)
    first, second, spare = cluster.servers
    wait_done(cluster, 10)
    first.send(signal.SIGKILL)
    wait_for_text(spare, "this is server")
    another = cluster.start_server()
    wait_done(cluster, int((cluster.folder / "done.0").read_text()) + 5)
    second.send(signal.SIGKILL)
    cluster.finish_with(training, [first, second])
    said = cluster.scheduler.text
    assert said.count("another server has 60.0 s (BYTEPS_REPLACE_SERVERS_S=60) to take") == 2
    assert said.count("has taken the place of the server that was lost") == 2
    assert "this is server" in another.text
    assert "sums that others may lack" in training[0].text


def test_one_that_is_told_to_end_is_replaced(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=1, env=WAIT)
    training = start_with_spare(cluster, steps=40, pace=0.03)
    wait_done(cluster, 5)
    cluster.servers[0].send(signal.SIGTERM)
    cluster.finish_with(training, [cluster.servers[0]])
    assert "was stopped by SIGTERM; another server has" in cluster.scheduler.text


def test_one_that_stands_still_is_replaced(make_cluster: Callable[..., Cluster]) -> None:
    """It learns of that when it goes on, and ends."""
    cluster = make_cluster(workers=2, servers=2, env={**WAIT, "BYTEPS_PEER_TIMEOUT_S": "3"})
    training = start_with_spare(cluster, steps=40, pace=0.03)
    wait_done(cluster, 5)
    still = cluster.servers[1]
    still.send(signal.SIGSTOP)
    cluster.finish_with(training, [still])
    still.send(signal.SIGCONT)
    assert still.wait(RUN_S) != 0
    assert "no heartbeat for" in cluster.scheduler.text


def test_nobody_comes(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=1, env={"BYTEPS_REPLACE_SERVERS_S": "2"})
    training = cluster.start("lost_servers:train", steps=1000, pace=0.03)
    wait_done(cluster, 3)
    cluster.servers[0].send(signal.SIGKILL)
    for worker in training:
        assert worker.wait(RUN_S) != 0
        assert "no other server took its place within 2.0 s" in worker.text, worker.text[-3000:]


def test_a_spare_that_nobody_needs_ends_well(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=1, env=WAIT)
    training = start_with_spare(cluster, steps=20, pace=0.02)
    cluster.finish_with(training, [])
    assert "done: no server was lost" in cluster.servers[-1].text


def test_optimizer_state_is_copied(make_cluster: Callable[..., Cluster]) -> None:
    """Each of two servers is lost, and the next one goes on from the other one's copy."""
    cluster = make_cluster(workers=2, servers=2, env={**WAIT, "BYTEPS_BACKUP_STATE": "1"})
    training = cluster.start("lost_servers:with_copies", steps=80, pace=0.03)
    wait_done(cluster, 1)
    first, second = cluster.servers
    for server in (first, second):
        wait_for_text(server, COPIED)
    wait_for_text(cluster.start_server(), "waiting for the place of a server")
    first.send(signal.SIGKILL)
    wait_for_text(second, COPIED, times=2)
    wait_for_text(cluster.start_server(), "waiting for the place of a server")
    wait_done(cluster, int((cluster.folder / "done.0").read_text()) + 5)
    second.send(signal.SIGKILL)
    cluster.finish_with(training, [first, second])
    said = cluster.scheduler.text
    assert said.count("has taken the place of the server that was lost") == 2


def test_optimizer_state_is_lost_with_its_server(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=1, env=WAIT)
    training = cluster.start("lost_servers:with_optimizer", steps=1000, pace=0.03)
    wait_done(cluster, 3)
    cluster.servers[0].send(signal.SIGKILL)
    for worker in training:
        assert worker.wait(RUN_S) != 0
    text = "".join(worker.text for worker in training)
    assert "the optimizer state that it had of" in text, text[-3000:]
    assert "load the last checkpoint" in text
