"""Metrics: what Prometheus gets from workers and servers is what the job did."""

from __future__ import annotations

import re
import socket
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from scripts.ports import free_ports
from tests.multiproc.cluster import END_S, LOOPBACK, Cluster, wait_all
from tests.multiproc.programs.observed import LARGE, ROUNDS, SMALL

PARTITIONS = 3 + 1  # of a round of both tensors
BYTES = 4 * (LARGE + SMALL)
WORKERS = 2

Figures = dict[str, float]


def scrape(port: int) -> Figures:
    """name{labels} -> value, of everything that is served."""
    url = f"http://{LOOPBACK}:{port}/metrics"
    with urllib.request.urlopen(url, timeout=END_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def of(figures: Figures, role: str, rank: int) -> Figures:
    """The figures of one process by their bare names; those of engine threads are added up."""
    found: Figures = {}
    for key, value in figures.items():
        name, _, labels = key.partition("{")
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if name.startswith("byteps_") and "le" not in pairs:
            assert (pairs["role"], pairs["rank"]) == (role, str(rank)), key
            name = name.removeprefix(f"byteps_{role}_")
            found[name] = found.get(name, 0.0) + value
    return found


def make(make_cluster: Callable[..., Cluster], program: str, **args: Any) -> tuple[Cluster, int]:
    """A cluster whose workers serve metrics at the port and the next, its server at the third."""
    port = free_ports(WORKERS + 1)
    env = {
        "BYTEPS_METRICS_PORT": str(port),
        "BYTEPS_METRICS_HOST": LOOPBACK,
        "BYTEPS_PARTITION_BYTES": "4096",
        # The server's; workers have their LOCAL_RANK, which must not contradict.
        "BYTEPS_LOCAL_RANK": str(WORKERS),
    }
    cluster = make_cluster(workers=WORKERS, servers=1, env=env)
    cluster.start_nodes()
    for rank in range(WORKERS):
        cluster.start_worker(rank, program, env={"BYTEPS_LOCAL_RANK": None}, **args)
    return cluster, port


def test_figures_of_a_known_job(make_cluster: Callable[..., Cluster]) -> None:
    cluster, port = make(make_cluster, "observed:known")
    cluster.wait_mark("done", range(WORKERS))
    for rank in range(WORKERS):
        worker = of(scrape(port + rank), "worker", rank)
        for direction in ("pushed", "pulled"):
            assert worker[f"{direction}_bytes_total"] == ROUNDS * BYTES
            assert worker[f"{direction}_partitions_total"] == ROUNDS * PARTITIONS
        assert worker["operations_total"] == worker["operation_seconds_count"] == 2 * ROUNDS
        assert worker["partition_seconds_count"] == ROUNDS * PARTITIONS
        assert worker["declared_tensors"] == 2
        for nothing in (
            *("failed_operations_total", "failed_requests_total", "running_operations"),
            *("push_queue_partitions", "unanswered_requests", "pull_queue_partitions"),
        ):
            assert worker[nothing] == 0, nothing
    # A round is closed a moment after its last answer.
    deadline = time.monotonic() + END_S
    while True:
        figures = scrape(port + WORKERS)
        server = of(figures, "server", 0)
        if server["open_rounds"] == 0 or time.monotonic() > deadline:
            break
    for direction in ("received", "answered"):
        assert server[f"{direction}_bytes_total"] == WORKERS * ROUNDS * BYTES
        assert server[f"{direction}_partitions_total"] == WORKERS * ROUNDS * PARTITIONS
    assert server["sums_total"] == server["round_wait_seconds_count"] == ROUNDS * PARTITIONS
    assert server["adding_seconds_total"] > 0
    assert server["declared_tensors"] == 2
    for nothing in ("failed_sums_total", "refused_requests_total", "open_rounds"):
        assert server[nothing] == 0, nothing
    engines = [name for name in figures if "engine_queue_tasks" in name]
    assert len(engines) == 4  # BYTEPS_SERVER_ENGINE_THREAD
    endless = [value for name, value in figures.items() if 'le="+Inf"' in name and "byteps" in name]
    assert endless == [ROUNDS * PARTITIONS]
    cluster.go("end")
    cluster.finish()


def test_what_waits_is_seen(make_cluster: Callable[..., Cluster]) -> None:
    """A worker that others wait for shows in their queues and in the server's open rounds."""
    cluster, port = make(make_cluster, "observed:waiting")
    cluster.wait_mark("pushed", [0])
    deadline = time.monotonic() + END_S
    while True:
        server = of(scrape(port + WORKERS), "server", 0)
        worker = of(scrape(port), "worker", 0)
        if server["open_rounds"] == 3 or time.monotonic() > deadline:
            break
    assert server["open_rounds"] == 3
    assert worker["unanswered_requests"] == 3
    assert worker["running_operations"] == 1
    cluster.go("push")
    cluster.finish()


def test_refused_requests_are_counted(make_cluster: Callable[..., Cluster]) -> None:
    cluster, port = make(make_cluster, "observed:disagreeing")
    cluster.wait_mark("done", range(WORKERS))
    assert of(scrape(port + WORKERS), "server", 0)["refused_requests_total"] >= 1
    told = [int(note.read_text()) for note in cluster.folder.glob("refused.*")]
    assert told
    assert all(count >= 1 for count in told)
    cluster.go("end")
    cluster.finish()


def test_embedded_servers_have_ports_after_the_workers(
    make_cluster: Callable[..., Cluster],
) -> None:
    port = free_ports(3)
    env = {"BYTEPS_METRICS_PORT": str(port), "BYTEPS_EMBEDDED_SERVERS": "2"}
    cluster = make_cluster(workers=1, env=env)
    names = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER", "DMLC_NUM_WORKER")
    nowhere = dict.fromkeys(names)
    cluster.start_worker(0, "observed:known", env=nowhere)
    cluster.wait_mark("done", [0])
    assert of(scrape(port), "worker", 0)["operations_total"] == 2 * ROUNDS
    ranks = sorted(rank for rank in range(2) for at in (1, 2) if is_server(scrape(port + at), rank))
    assert ranks == [0, 1]
    cluster.go("end")
    cluster.finish()


def is_server(figures: Figures, rank: int) -> bool:
    return f'byteps_server_sums_total{{role="server",rank="{rank}"}}' in figures


def test_half_requests_delay_no_scrape(make_cluster: Callable[..., Cluster]) -> None:
    """Of unauthenticated clients, which connect and do not finish what they ask."""
    cluster, port = make(make_cluster, "observed:known")
    cluster.wait_mark("done", range(WORKERS))
    with ExitStack() as halves:
        for at in (port, port + WORKERS):
            for _ in range(200):
                half = socket.create_connection((LOOPBACK, at), timeout=END_S)
                halves.enter_context(half)
                half.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        for _ in range(10):
            assert of(scrape(port), "worker", 0)["operations_total"] == 2 * ROUNDS
            assert of(scrape(port + WORKERS), "server", 0)["sums_total"] > 0
    cluster.go("end")
    cluster.finish()


def test_by_default_one_address_of_the_job_and_loopback(
    make_cluster: Callable[..., Cluster],
) -> None:
    """And no other one, which may lead to another network."""
    port = free_ports(2)
    host = "127.0.0.2"
    env = {"BYTEPS_METRICS_PORT": str(port), "DMLC_NODE_HOST": host, "BYTEPS_LOCAL_RANK": "1"}
    cluster = make_cluster(workers=1, servers=1, env=env)
    cluster.start_nodes()
    cluster.start_worker(0, "observed:known", env={"BYTEPS_LOCAL_RANK": None})
    cluster.wait_mark("done", [0])
    for at in (port, port + 1):
        for served in (LOOPBACK, host):
            socket.create_connection((served, at), timeout=END_S).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", at), timeout=END_S)
    cluster.go("end")
    cluster.finish()


def test_port_that_is_taken(make_cluster: Callable[..., Cluster]) -> None:
    """Worker and server name the variable and the port, and do not join."""
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        env = {"BYTEPS_METRICS_PORT": str(port), "BYTEPS_METRICS_HOST": LOOPBACK}
        cluster = make_cluster(workers=1, servers=1, env=env)
        cluster.start_scheduler()
        server = cluster.start_server()
        worker = cluster.start_worker(0, "failures:init_only")
        wait_all([server, worker], END_S)
    assert server.wait(0) == 2, server.text
    assert worker.status == 1
    for process in (server, worker):
        assert f"BYTEPS_METRICS_PORT={port}" in process.text
