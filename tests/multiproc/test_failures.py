"""When a process is lost, every process ends within a bounded time with an error that names it."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from scripts.children import free_ports
from tests.multiproc.cluster import END_S, LOOPBACK, Cluster, stop, wait_all
from tests.multiproc.endings import (
    AT_ONCE,
    demand_error,
    demand_failed,
    error_of,
    start_looping,
    wait_for_text,
)

PEER_TIMEOUT_S = 3
SHORT = {
    "BYTEPS_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S),
    "BYTEPS_START_TIMEOUT_S": "3",
    "BYTEPS_PARTITION_BYTES": "4096",
}
CLOSED = "connection (was )?(closed|reset)"
SILENT = f"no heartbeat.*BYTEPS_PEER_TIMEOUT_S={PEER_TIMEOUT_S}"


class TestKilled:
    """Processes are killed, so their connections close. (Processes that are stopped are in
    test_endings.py.)"""

    def test_worker(self, make_cluster: Callable[..., Cluster]) -> None:
        cluster = start_looping(make_cluster, SHORT, workers=3, servers=2)
        cluster.workers["worker 1"].send(signal.SIGKILL)
        survivors = [cluster.workers["worker 0"], cluster.workers["worker 2"]]
        nodes = [*cluster.servers, cluster.scheduler]
        wait_all([*survivors, *nodes], END_S)
        for worker in survivors:
            demand_error(worker, r"worker 1\b.*lost", CLOSED)
        for node in nodes:
            demand_failed(node, r"worker 1\b.*lost")

    def test_server(self, make_cluster: Callable[..., Cluster]) -> None:
        cluster = start_looping(make_cluster, SHORT, workers=2, servers=2)
        lost = cluster.servers[1]
        lost.send(signal.SIGKILL)
        survivors = list(cluster.workers.values())
        wait_all([*survivors, cluster.servers[0], cluster.scheduler], END_S)
        for worker in survivors:
            # The order of registration decides which of the two is server 1.
            demand_error(worker, r"server [01]\b.*lost", CLOSED)
        demand_failed(cluster.servers[0], r"server [01]\b.*lost")
        demand_failed(cluster.scheduler, r"server [01]\b.*lost")

    def test_scheduler(self, make_cluster: Callable[..., Cluster]) -> None:
        cluster = start_looping(make_cluster, SHORT, workers=2, servers=2)
        cluster.scheduler.send(signal.SIGKILL)
        survivors = list(cluster.workers.values())
        wait_all([*survivors, *cluster.servers], END_S)
        for worker in survivors:
            demand_error(worker, r"scheduler\b.*lost", CLOSED)
        for server in cluster.servers:
            demand_failed(server, r"scheduler\b.*lost")


def test_rounds_end_while_their_server_closes_its_connections(
    make_cluster: Callable[..., Cluster],
) -> None:
    """The server waits a second for answers that are not read. In this time sums reach their
    deadlines, and fail."""
    cluster = make_cluster(workers=2, servers=1, env={"BYTEPS_OP_TIMEOUT_S": "5"})
    cluster.start("failures:unread")
    cluster.wait_mark("pushed", [0])
    cluster.workers["worker 0"].send(signal.SIGSTOP)
    cluster.go("push")
    cluster.wait_mark("summed", [1])
    for worker in ("worker 1", "worker 0"):
        cluster.workers[worker].send(signal.SIGKILL)
        if worker == "worker 1":
            demand_failed(cluster.servers[0], r"worker 1\b.*lost")


def test_server_lost_before_any_worker_came(make_cluster: Callable[..., Cluster]) -> None:
    """Before the job has begun, another server can take the rank of a lost server. The job then
    runs."""
    cluster = make_cluster(workers=1, servers=1, env={**SHORT, "PS_VERBOSE": "1"})
    scheduler = cluster.start_scheduler()
    lost = cluster.start_server()
    wait_for_text(scheduler, "admitted server 0")
    lost.send(signal.SIGKILL)
    # The server is killed before it has read its welcome, so the kernel resets the connection. This
    # could also be a network failure, after which the server might return.
    wait_for_text(
        scheduler, rf"server 0 .*lost: .*({CLOSED}|{SILENT}).*another server may take its place"
    )
    cluster.start_server()
    cluster.start_worker(0, "failures:init_only")
    assert lost.wait(END_S) != 0
    cluster.servers.remove(lost)
    cluster.finish()


@pytest.mark.parametrize(
    ("there", "why"),
    [
        ("nothing", "connection refused: nothing listens at"),
        ("mute", "it took the connection and said nothing"),
        ("absent", "nothing answers at"),
    ],
)
def test_a_missing_scheduler_is_an_error(
    make_cluster: Callable[..., Cluster], there: str, why: str
) -> None:
    """No process listens at the address, or a program accepts and never answers, or packets are
    dropped because a queue is full. Worker and server report this after the start timeout."""
    cluster = make_cluster(workers=1, servers=1, env=SHORT)
    cluster.port = free_ports()
    with ExitStack() as stack:
        other = socket.create_server(
            (LOOPBACK, cluster.port), backlog=0 if there == "absent" else None
        )
        stack.enter_context(other)
        if there == "nothing":
            other.close()
        for _ in range(4 if there == "absent" else 0):
            queued = stack.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex((LOOPBACK, cluster.port))
        pattern = rf"scheduler.*{LOOPBACK}:{cluster.port}.*did not answer.*BYTEPS_START_TIMEOUT_S=3"
        pattern += rf"\).*: .*{why}"
        server = cluster.start_server()
        worker = cluster.start_worker(0, "failures:init_only")
        wait_all([server, worker], END_S)
    demand_error(worker, pattern)
    demand_failed(server, pattern)


def test_scheduler_comes_late(make_cluster: Callable[..., Cluster]) -> None:
    """Workers and servers may be started first, because they keep trying to connect."""
    cluster = make_cluster(workers=1, servers=1)
    cluster.port = free_ports()
    worker = cluster.start_worker(0, "failures:init_only")
    cluster.start_server()
    time.sleep(1.0)
    assert worker.running
    cluster.start_scheduler()
    cluster.finish()


def test_worker_missing_at_start(make_cluster: Callable[..., Cluster]) -> None:
    """The error has the numbers of registered nodes."""
    cluster = make_cluster(workers=2, servers=1, env=SHORT)
    cluster.start_nodes()
    worker = cluster.start_worker(0, "failures:init_only")
    wait_all(cluster.everyone(), END_S)
    demand_error(worker, r"1 (of|/) 2 workers", r"1 (of|/) 1 server", "BYTEPS_START_TIMEOUT_S=3")
    demand_failed(cluster.scheduler, r"1 (of|/) 2 workers")
    demand_failed(cluster.servers[0])


def test_rank_that_never_calls(make_cluster: Callable[..., Cluster]) -> None:
    """All ranks are alive, but one does not call the operation. The other ranks' error names it."""
    env = {
        **SHORT,
        "BYTEPS_OP_TIMEOUT_S": "2",
        "BYTEPS_SERVER_ENGINE_THREAD": "1",
    }
    cluster = make_cluster(workers=3, servers=1, env=env)
    cluster.start("failures:missing", missing=2, traffic=True)
    waiting = [cluster.workers["worker 0"], cluster.workers["worker 1"]]
    wait_all(waiting, END_S)
    for worker in waiting:
        # The rank that gets the error first may leave at once, and the other's error reports that.
        demand_error(worker, r"layer\.grad|busy")
    errors = [error_of(worker) for worker in waiting]
    wanted = r"layer\.grad.*timed out.*worker 2\b.*BYTEPS_OP_TIMEOUT_S=2"
    assert any(re.search(wanted, text) for text in errors), errors
    cluster.go("end")
    wait_all(cluster.everyone(), END_S)


def test_worker_that_leaves_early(make_cluster: Callable[..., Cluster]) -> None:
    """A rank that left normally will never push, so the others get an error without a timeout."""
    cluster = make_cluster(workers=3, servers=2, env=SHORT)
    cluster.start("failures:missing", missing=1, leaves=True)
    wait_all(cluster.everyone(), END_S)
    assert cluster.workers["worker 1"].status == 0
    for rank in (0, 2):
        demand_error(cluster.workers[f"worker {rank}"], r"worker 1\b.*left the job")


def test_signals_end_nodes_that_still_wait_for_others(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(workers=1, servers=2, env=AT_ONCE)
    cluster.start_nodes()
    time.sleep(1.0)  # The test cannot wait for a server's admission, because it leaves no sign.
    # Each node gets its signal before another node can report the node's end.
    for node in cluster.servers:
        stop(node)
        node.send(signal.SIGTERM)
    for node in cluster.servers:
        node.send(signal.SIGCONT)
    for node in cluster.servers:
        assert node.wait(END_S) in (143, -signal.SIGTERM), node.text
        assert "told to end by SIGTERM" in node.text
    assert cluster.scheduler.running
    cluster.scheduler.send(signal.SIGTERM)
    assert cluster.scheduler.wait(END_S) in (143, -signal.SIGTERM), cluster.scheduler.text


class TestWrongCluster:
    """Workers that do not belong to the job are refused, and the job goes on."""

    def test_surplus_worker(self, make_cluster: Callable[..., Cluster]) -> None:
        """A worker that comes to a complete, running job, with a rank that is taken, is refused."""
        cluster = make_cluster(workers=2, servers=1, env=SHORT)
        cluster.start("failures:steady")
        cluster.wait_mark("looping", range(2))
        surplus = cluster.start_worker(0, "failures:init_only", title="surplus")
        demand_error(surplus, r"\b0\b|\b2\b", "(?i)worker|rank")
        assert all(process.running for process in cluster.everyone() if process is not surplus)
        cluster.go("end")
        del cluster.workers["surplus"]
        cluster.finish()

    def test_rank_twice_at_start(self, make_cluster: Callable[..., Cluster]) -> None:
        """Two workers claim rank 0. The second one is refused with the reason."""
        cluster = make_cluster(workers=2, servers=1, env=SHORT)
        cluster.start_nodes()
        twins = [cluster.start_worker(0, "failures:init_only", title=f"twin {i}") for i in range(2)]
        wait_all(cluster.everyone(), END_S)
        errors = [error_of(twin) for twin in twins]
        assert any(re.search(r"(?i)(worker|rank)\W*0\b", text) for text in errors), errors
