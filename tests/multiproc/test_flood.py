"""Thousands of peers: unauthenticated peers neither keep a job from starting nor end a running job,
and a single scheduler serves a job of two thousand nodes."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.children import captured
from tests import native
from tests.multiproc.cluster import END_S, LOOPBACK, SECRET, Cluster, Process
from tests.multiproc.flood import Flood, Hello, Plan, greeted, read_all
from tests.multiproc.test_reconnect import between, rounds_of, server_port, wait_for_rounds

MOST_LINES = 10
MOST_MIB = 64
MOST_FILES = 1024
BURST = 5000
"""Number of peers of a flood. It exceeds the number that the kernel queues for one listener."""


def peak_mib(process: Process) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) / 1024


def open_files(process: Process) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


@contextmanager
def flooded(process: Process, plan: Plan, folder: Path) -> Iterator[Flood]:
    """Context in which a process is flooded. Checks that the flood costs the process little."""
    mib, files = peak_mib(process), open_files(process)
    with Flood(plan, folder) as flood:
        flood.wait_ready()
        yield flood
        assert peak_mib(process) - mib <= MOST_MIB
        assert open_files(process) - files <= MOST_FILES
        done = flood.stop()
        assert done["opened"] >= plan.burst and done["connect"] == 0, done
    said = re.findall(r".*(?:pending_peers|greeter|listener)\.cc.*\n", process.text)
    assert len(said) <= MOST_LINES, "".join(said)


def plan_for(port: int, kind: str, sources: int) -> Plan:
    return Plan(address=(LOOPBACK, port), kind=kind, burst=BURST, sources=sources)


def break_links(cluster: Cluster) -> None:
    """Break the first worker's connections to scheduler and server."""
    worker = cluster.workers["worker 0"]
    for port in (cluster.port, server_port(cluster, 0)):
        for connection in between(worker.pid, port):
            connection.reset()


@pytest.mark.parametrize(
    ("kind", "sources"), [pytest.param("silent", 0, marks=pytest.mark.thorough), ("talking", 50)]
)
def test_a_job_amid_a_flood(make_cluster: Callable[..., Cluster], kind: str, sources: int) -> None:
    """Connections of a whole job break while first the scheduler and then the server is flooded,
    from the nodes' own address and from other addresses."""
    cluster = make_cluster(workers=2, servers=1)
    scheduler = cluster.start_scheduler()
    with flooded(scheduler, plan_for(cluster.port, kind, sources), cluster.folder):
        cluster.start_server()
        for rank in range(2):
            cluster.start_worker(rank, "failures:checked", most=60_000)
        cluster.wait_mark("looping", range(2))
        break_links(cluster)
        wait_for_rounds(cluster, 3)
    server = cluster.servers[0]
    plan = plan_for(server_port(cluster, 0), kind, sources)
    with flooded(server, plan, cluster.folder):
        break_links(cluster)
        wait_for_rounds(cluster, 3)
        break_links(cluster)
        wait_for_rounds(cluster, 3)
    assert rounds_of(cluster) >= 3
    cluster.go("end")
    cluster.finish()


def test_one_that_never_stops_talking_is_closed(make_cluster: Callable[..., Cluster]) -> None:
    """A peer that goes on sending gets the reason of its refusal, and few of its further bytes are
    read."""
    most = 64 << 20
    cluster = make_cluster(workers=1, servers=1)
    cluster.start_scheduler()
    sent: list[int] = []
    with socket.create_connection((LOOPBACK, cluster.port), timeout=END_S) as stranger:

        def talk() -> None:
            junk = b"\xff" * (1 << 20)
            try:
                while sum(sent) < most:
                    sent.append(stranger.send(junk))
            except OSError:
                return

        # The peer sends so much that there is always unread data.
        talkers = [threading.Thread(target=talk) for _ in range(4)]
        for talker in talkers:
            talker.start()
        assert b"does not speak this protocol" in read_all(stranger)
        for talker in talkers:
            talker.join(END_S)
    # 256 KiB, and the buffers of both kernels
    assert sum(sent) < most // 2
    with greeted((LOOPBACK, cluster.port), Hello(), SECRET) as (_, refused):
        assert refused == ""


# A single scheduler serves a job of two thousand nodes.


WORKERS = SERVERS = 1000
PATIENCE_S = 400
"""Limit in seconds, only against hangs. The test takes seconds."""
MESSAGES_A_NODE = 20
"""Messages per node, without heartbeats: welcome, the servers or the start, a farewell, its
workers' departures, and an end. The scheduler sends departures in batches, in two or three
messages, more on a busy machine. A message per departure would mean thousands."""

MOST_LINES_OF_ALL = 80
"""Limit of log lines: 16 nodes that come and 16 that leave are named, the others are counted."""


def test_two_thousand_nodes_join_and_leave(make_cluster: Callable[..., Cluster]) -> None:
    program = native.build("swarm") / "swarm"
    patience = {"BYTEPS_START_TIMEOUT_S": "120", "BYTEPS_PEER_TIMEOUT_S": "120"}
    cluster = make_cluster(workers=WORKERS, servers=SERVERS, env=patience)
    scheduler = cluster.start_scheduler()
    swarm = captured([
            *(program, "--host", LOOPBACK, "--port", str(cluster.port)),
            *("--workers", str(WORKERS), "--servers", str(SERVERS), "--timeout", "120"),
        ], PATIENCE_S, env=cluster.node_environment())  # fmt: skip
    assert swarm.returncode == 0, swarm.stdout + swarm.stderr
    match = re.search(r"([\d.]+) for each node", swarm.stdout)
    assert match is not None, swarm.stdout
    assert float(match[1]) <= MESSAGES_A_NODE
    assert scheduler.wait(PATIENCE_S) == 0, scheduler.text
    said = scheduler.text.splitlines()
    assert len(said) <= MOST_LINES_OF_ALL, said
    assert "the job is complete, 1000 workers and 1000 servers" in scheduler.text
