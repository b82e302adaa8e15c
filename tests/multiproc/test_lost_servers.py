"""Servers and schedulers are lost. The job goes on, all sums are right, and replacements take
over."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import RUN_S, Cluster, stop
from tests.multiproc.endings import (
    COPIED,
    COPIES,
    RETURNS,
    WAIT,
    await_copies,
    kill_scheduler,
    others,
    replace_scheduler,
    start_with_spare,
    wait_done,
    wait_for_count,
)


def test_spares_take_the_places_of_two(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=2, env=WAIT)
    training = start_with_spare(cluster, steps=60, pace=0.03)
    first, second, spare = cluster.servers
    wait_done(cluster, 10)
    first.send(signal.SIGKILL)
    wait_for_count(spare, "this is server")
    another = cluster.start_server()
    wait_done(cluster, int((cluster.folder / "done.0").read_text()) + 5)
    second.send(signal.SIGKILL)
    cluster.finish_with(training, [first, second])
    said = cluster.scheduler.text
    assert said.count("another server has 60.0 s (BYTEPS_REPLACE_SERVERS_S=60) to take") == 2
    assert said.count("has taken the place of the server that was lost") == 2
    assert "this is server" in another.text
    assert "sums that others may lack" in training[0].text


def test_one_off_sums_are_kept_until_all_have_them(make_cluster: Callable[..., Cluster]) -> None:
    """One-off sums of 32 MiB are released some steps later. Then a server is lost."""
    cluster = make_cluster(workers=2, servers=2, env=WAIT)
    training = cluster.start("lost_servers:one_off", steps=30)
    cluster.wait_mark("trained", range(2), RUN_S)
    spare = cluster.start_server()
    wait_for_count(spare, "waiting for the place of a server")
    cluster.servers[0].send(signal.SIGKILL)
    cluster.go("on")
    cluster.finish_with(training, [cluster.servers[0]])
    kept_bytes = [int(n) for n in re.findall(r"with (\d+) bytes of sums", training[0].text)]
    assert len(kept_bytes) == 1 and kept_bytes[0] < 8 << 20, kept_bytes


def test_the_job_ends_if_no_server_replaces_a_lost_one(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(workers=2, servers=1, env={"BYTEPS_REPLACE_SERVERS_S": "2"})
    training = cluster.start("lost_servers:train", steps=1000, pace=0.03)
    wait_done(cluster, 3)
    cluster.servers[0].send(signal.SIGKILL)
    for worker in training:
        assert worker.wait(RUN_S) != 0
        assert "no other server took its place within 2.0 s" in worker.text, worker.text[-3000:]


def test_a_spare_that_nobody_needs_ends_well(make_cluster: Callable[..., Cluster]) -> None:
    """The server does not wait for another scheduler, because the present one reports that the job
    is over."""
    cluster = make_cluster(workers=2, servers=1, env={**WAIT, **RETURNS})
    training = start_with_spare(cluster, steps=20, pace=0.02)
    cluster.finish_with(training, [])
    assert re.search("done: no server was lost.*: the job has ended", cluster.servers[-1].text)


def test_optimizer_state_is_copied(make_cluster: Callable[..., Cluster]) -> None:
    """Each of two servers is lost. Its successor continues from the other server's copy. Servers
    encrypt their traffic."""
    cluster = make_cluster(workers=2, servers=2, env={**COPIES, "BYTEPS_TLS": "1"})
    training = cluster.start("lost_servers:with_copies", steps=80, pace=0.03)
    first, second = cluster.servers
    await_copies(cluster)
    first.send(signal.SIGKILL)
    wait_for_count(second, COPIED, times=2)
    wait_for_count(cluster.start_server(), "waiting for the place of a server")
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


# Jobs whose scheduler dies. They go on, and another scheduler takes over.


PACE = {"steps": 1_000_000, "pace": 0.03}


def test_the_job_goes_on_without_it_and_with_the_next(make_cluster: Callable[..., Cluster]) -> None:
    """The scheduler dies twice."""
    cluster = make_cluster(workers=3, servers=2, env=RETURNS)
    cluster.start("lost_servers:train", steps=50, holds=[10, 20, 30, 40])
    for number, step in ((1, 10), (2, 30)):
        replace_scheduler(cluster, number, step)
    cluster.finish()


@pytest.mark.thorough
def test_a_scheduler_that_stands_still_is_replaced(make_cluster: Callable[..., Cluster]) -> None:
    """No connection closes, as when a machine is lost or cut off."""
    cluster = make_cluster(workers=2, servers=1, env={**RETURNS, "BYTEPS_PEER_TIMEOUT_S": "8"})
    cluster.start("lost_servers:train", steps=30, holds=[10, 20])
    wait_done(cluster, 10)
    stop(cluster.scheduler)
    for node in others(cluster):
        wait_for_count(node, "was lost: no heartbeat for", 1)
    cluster.go("10")
    wait_done(cluster, 20)
    kill_scheduler(cluster)
    cluster.start_scheduler()
    for node in others(cluster):
        wait_for_count(node, "is there again after", 1)
    cluster.go("20")
    cluster.finish()


def test_workers_that_leave_meanwhile_wait_for_the_next(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(workers=2, servers=2, env=RETURNS)
    training = cluster.start("lost_servers:train", steps=30, holds=[10])
    wait_done(cluster, 10)
    kill_scheduler(cluster)
    cluster.go("10")
    wait_done(cluster, 30)
    cluster.start_scheduler()
    cluster.finish()
    assert all("is there again after" in worker.text for worker in training)


def test_a_server_that_does_not_return_ends_the_job(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=1, env={"BYTEPS_SCHEDULER_RETURN_S": "2"})
    cluster.start("lost_servers:train", **PACE)
    wait_done(cluster, 3)
    kill_scheduler(cluster)
    for node in others(cluster):
        assert node.wait(RUN_S) != 0
        assert "it did not return within 2.0 s (BYTEPS_SCHEDULER_RETURN_S=2)" in node.text
        assert f"scheduler (127.0.0.1:{cluster.port}) was lost" in node.text


def test_a_worker_that_is_lost_meanwhile_fails_the_job(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(workers=2, servers=1, env={"BYTEPS_SCHEDULER_RETURN_S": "8"})
    training = cluster.start("lost_servers:train", **PACE)
    wait_done(cluster, 3)
    kill_scheduler(cluster)
    training[1].send(signal.SIGKILL)
    cluster.start_scheduler()
    assert training[0].wait(RUN_S) != 0
    assert cluster.scheduler.wait(RUN_S) == 1
    assert "worker 1 (unknown) did not come back to the scheduler" in training[0].text


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"BYTEPS_SECRET": "e" * 64}, "the two nodes have different job secrets"),
        ({"DMLC_NUM_WORKER": "3"}, "it is in a job of 2 workers and 1 server, the scheduler was "),
        ({"BYTEPS_SCHEDULER_RETURN_S": "0"}, "it belongs to another job"),
    ],
    ids=["secret", "size", "setting"],
)
def test_another_scheduler_there_is_named(
    make_cluster: Callable[..., Cluster], env: dict[str, str], why: str
) -> None:
    limits = {"BYTEPS_SCHEDULER_RETURN_S": "4", "BYTEPS_RECONNECT_TIMEOUT_S": "2"}
    cluster = make_cluster(workers=2, servers=1, env=limits)
    training = cluster.start("lost_servers:train", **PACE)
    wait_done(cluster, 3)
    kill_scheduler(cluster)
    cluster.workers_wanted = int(env.get("DMLC_NUM_WORKER", 2))
    cluster.set_env(env)
    cluster.start_scheduler()
    for worker in training:
        assert worker.wait(RUN_S) != 0
        assert why in worker.text, worker.text[-3000:]
