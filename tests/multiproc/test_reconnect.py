"""A connection that breaks while both processes live costs time, but no sum and not the job."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable

from tests.multiproc.cluster import END_S, Cluster, Process, stop, wait_all, wait_for_file
from tests.multiproc.endings import (
    Socket,
    connections_of,
    demand_error,
    demand_failed,
    start_looping,
    wait_for_text,
)

RESETS = 12
"""Number of resets per kind of link, at arbitrary moments."""
SETTINGS = {"BYTEPS_PARTITION_BYTES": "65536", "BYTEPS_CONNECTIONS": "2"}


def between(pid: int, port: int) -> list[Socket]:
    """Return a process's sockets that are connected to a port."""
    return [connection for connection in connections_of(pid) if connection.remote == port]


def server_port(cluster: Cluster, index: int) -> int:
    return int(wait_for_file(cluster.folder / f"server {index}.port", END_S).split()[1])


def resent(cluster: Cluster) -> bool:
    text = "".join(process.text for process in cluster.everyone())
    return re.search(r"messages sent again: [1-9]", text) is not None


def rounds_of(cluster: Cluster) -> int:
    path = cluster.folder / "rounds.0"
    return int(path.read_text()) if path.exists() else 0


def wait_for_rounds(cluster: Cluster, more: int) -> None:
    target = rounds_of(cluster) + more
    deadline = time.monotonic() + END_S
    while rounds_of(cluster) < target:
        assert time.monotonic() < deadline, "the job stands still"
        assert all(worker.running for worker in cluster.workers.values())
        time.sleep(0.005)


def test_broken_data_connections_are_restored(make_cluster: Callable[..., Cluster]) -> None:
    """Connections between workers and servers break in the middle of rounds."""
    cluster = make_cluster(workers=2, servers=2, env=SETTINGS)
    cluster.start("failures:checked")
    cluster.wait_mark("looping", range(2))
    broken = 0
    deadline = time.monotonic() + END_S
    # Connections are reset until one has broken with a message in flight.
    while broken < RESETS or not resent(cluster):
        assert time.monotonic() < deadline, "whenever a connection broke, nothing was under way"
        worker = cluster.workers[f"worker {broken % 2}"]
        for connection in between(worker.pid, server_port(cluster, broken // 2 % 2)):
            connection.reset()
        broken += 1
        wait_for_rounds(cluster, 1)
    cluster.go("end")
    cluster.finish()


def test_broken_connections_with_the_scheduler_are_restored(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(workers=2, servers=2, env=SETTINGS)
    cluster.start("failures:checked")
    cluster.wait_mark("looping", range(2))
    processes: list[Process] = [*cluster.workers.values(), *cluster.servers]
    for number, process in enumerate(processes):
        (connection,) = between(process.pid, cluster.port)
        connection.reset()
        # The scheduler has logged one line for each reset so far.
        wait_for_text(cluster.scheduler, rf"(?s)(made again after.*){{{number + 1}}}")
    cluster.go("end")
    cluster.finish()


def test_all_connections_that_break_at_once_are_restored(
    make_cluster: Callable[..., Cluster],
) -> None:
    """A restarted firewall drops all connections."""
    cluster = make_cluster(workers=2, servers=2, env=SETTINGS)
    cluster.start("failures:checked")
    cluster.wait_mark("looping", range(2))
    for _ in range(3):
        for process in cluster.everyone():
            for connection in connections_of(process.pid):
                connection.reset()
        wait_for_rounds(cluster, 2)
    cluster.go("end")
    cluster.finish()


def test_a_connection_to_a_silent_server_is_restored_later(
    make_cluster: Callable[..., Cluster],
) -> None:
    """The connection cannot be restored at once. Nodes restore it when this is possible."""
    cluster = make_cluster(workers=2, servers=1, env=SETTINGS)
    cluster.start("failures:checked")
    cluster.wait_mark("looping", range(2))
    stop(cluster.servers[0])
    for worker in cluster.workers.values():
        for connection in between(worker.pid, server_port(cluster, 0)):
            connection.reset()
    time.sleep(2)
    cluster.servers[0].send(signal.SIGCONT)
    wait_for_rounds(cluster, 2)
    cluster.go("end")
    cluster.finish()


def test_reconnecting_ends_after_its_time_limit(make_cluster: Callable[..., Cluster]) -> None:
    """A connection that stays broken for longer than the timeout counts as a loss. The error names
    the link, both ends and the limit."""
    env = {**SETTINGS, "BYTEPS_RECONNECT_TIMEOUT_S": "2"}
    cluster = start_looping(make_cluster, env, workers=2, servers=1)
    (server,) = cluster.servers
    stop(server)
    for connection in between(cluster.workers["worker 1"].pid, server_port(cluster, 0)):
        connection.reset()
    survivors = list(cluster.workers.values())
    wait_all(survivors, END_S)
    for worker in survivors:
        demand_error(
            worker,
            r"server 0 \(.*\) was lost to worker [01] \(.*\): its connection (was reset|timed out)"
            r", and could not be made again within 2(\.0)? s \(BYTEPS_RECONNECT_TIMEOUT_S=2\)",
        )
    server.send(signal.SIGCONT)
    demand_failed(server, "was lost to worker [01]")


def test_without_reconnecting_a_broken_connection_ends_the_job(
    make_cluster: Callable[..., Cluster],
) -> None:
    """With a timeout of 0, a broken connection counts as a loss at once."""
    env = {**SETTINGS, "BYTEPS_RECONNECT_TIMEOUT_S": "0"}
    cluster = start_looping(make_cluster, env, workers=2, servers=1)
    for connection in between(cluster.workers["worker 1"].pid, server_port(cluster, 0)):
        connection.reset()
    survivors = list(cluster.workers.values())
    wait_all(survivors, END_S)
    for worker in survivors:
        demand_error(worker, "was lost to (worker 1|server 0)")
