"""The scheduler's status and the Prometheus metrics show what the cluster does."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from scripts.children import captured, free_ports
from tests.multiproc.cluster import (
    END_S,
    LOOPBACK,
    REPOSITORY,
    RUN_S,
    START_S,
    Cluster,
    clean_environment,
    stop,
)
from tests.multiproc.programs.lifecycle import LARGE, PARTITIONS, ROUNDS, SMALL

STATUS = REPOSITORY / "scripts/status.sh"
WORKERS = 2
BYTES = 4 * (LARGE + SMALL)
# Nodes send a heartbeat every sixth of BYTEPS_PEER_TIMEOUT_S.
QUICK = {"BYTEPS_PEER_TIMEOUT_S": "3", "BYTEPS_PARTITION_BYTES": "4096"}


def get(port: int, path: str, method: str = "GET") -> tuple[int, str, str]:
    """Return status, type and body of the answer."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=END_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


def status_of(port: int) -> dict[str, Any]:
    code, kind, body = get(port, "/status")
    assert (code, kind) == (200, "application/json")
    return json.loads(body)


def wait_for(port: int, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first status for which `holds` is true."""
    deadline = time.monotonic() + RUN_S
    while time.monotonic() < deadline:
        status = status_of(port)
        if holds(status):
            return status
        time.sleep(0.05)
    raise AssertionError(
        f"the awaited status did not come; the last one was {json.dumps(status, indent=1)}"
    )


def make(make_cluster: Callable[..., Cluster], **env: str) -> tuple[Cluster, int]:
    port = free_ports(1)
    env = {**QUICK, "BYTEPS_STATUS_PORT": str(port), **env}
    cluster = make_cluster(workers=WORKERS, servers=1, env=env)
    cluster.start_scheduler()
    return cluster, port


def test_figures_of_a_known_job(make_cluster: Callable[..., Cluster]) -> None:
    cluster, port = make(make_cluster)
    first = status_of(port)
    assert (first["schema"], first["state"], first["nodes"]) == (1, "gathering", [])
    assert first["workers"] == {"expected": WORKERS, "active": 0, "left": 0}
    cluster.start_server()
    wait_for(port, lambda s: s["servers"]["active"] == 1)
    for rank in range(WORKERS):
        cluster.start_worker(rank, "lifecycle:known")
    cluster.wait_mark("done", range(WORKERS))

    def complete(status: dict[str, Any]) -> bool:
        sent = [node["sent_bytes"] for node in status["nodes"]]
        return sent == [WORKERS * ROUNDS * BYTES] + WORKERS * [ROUNDS * BYTES]

    status = wait_for(port, complete)
    assert status["state"] == "running"
    assert status["scheduler"] == f"{LOOPBACK}:{cluster.port}"
    server, *workers = status["nodes"]
    assert (server["role"], server["rank"], server["state"]) == ("server", 0, "active")
    assert (server["tensors"], server["keys"]) == (2, PARTITIONS)
    assert server["finished"] == ROUNDS * PARTITIONS
    assert server["received_bytes"] == server["sent_bytes"]
    assert server["pid"] == cluster.servers[0].pid
    assert server["address"].startswith(f"{LOOPBACK}:")
    for rank, worker in enumerate(workers):
        assert (worker["role"], worker["rank"]) == ("worker", rank)
        assert worker["pid"] == cluster.workers[f"worker {rank}"].pid
        assert (worker["finished"], worker["failed"]) == (2 * ROUNDS, 0)
        assert worker["received_bytes"] == ROUNDS * BYTES
    cluster.go("end")
    cluster.finish()


def test_the_page_and_the_status_are_served(make_cluster: Callable[..., Cluster]) -> None:
    cluster, port = make(make_cluster)
    code, kind, page = get(port, "/")
    assert (code, kind) == (200, "text/html; charset=utf-8")
    # The page loads nothing from other addresses.
    assert not re.findall(r"https?://|src=|@import", page)
    assert get(port, "/nothing")[0] == 404
    assert get(port, "/status", "POST")[0] == 405
    cluster.start_server()
    wait_for(port, lambda s: s["servers"]["active"] == 1)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return captured([STATUS, *words], START_S, env=clean_environment(cluster.folder))

    said = run(f"{LOOPBACK}:{port}")
    assert said.returncode == 0, said.stderr
    assert "job gathering" in said.stdout and "0 of 2 workers, 1 of 1 servers" in said.stdout
    assert re.search(rf"^server 0 +{LOOPBACK}:\d+ ", said.stdout, re.M)
    assert json.loads(run(f"{LOOPBACK}:{port}", "--json").stdout)["state"] == "gathering"
    # The program that answers there is not the scheduler's status page.
    wrong = run(f"{LOOPBACK}:{cluster.port}")
    assert wrong.returncode == 1
    assert "no scheduler shows its status" in wrong.stderr
    assert "--status-host" not in wrong.stderr
    # The page is only shown on the scheduler's machine, so a request from another machine is
    # refused. (A host name does not count as loopback.)
    elsewhere = run(f"no-such-host.invalid:{port}")
    assert elsewhere.returncode == 1
    assert "or without --status-host" in elsewhere.stderr and "ssh -L" in elsewhere.stderr
    for words in ([], ["here"], ["a:b"], ["--what"], ["h:1", "h:2"]):
        assert run(*words).returncode == 2, words


def test_the_slowest_worker_and_the_rates(make_cluster: Callable[..., Cluster]) -> None:
    cluster, port = make(make_cluster)
    cluster.start_server()
    for rank in range(WORKERS):
        cluster.start_worker(rank, "lifecycle:straggling")
    status = wait_for(
        port,
        lambda s: (
            s["slowest_worker"] is not None
            and len(s["nodes"]) == 1 + WORKERS
            and all(node["sent_bytes_per_s"] > 0 for node in s["nodes"])
        ),
    )
    assert status["slowest_worker"]["rank"] == WORKERS - 1
    assert status["slowest_worker"]["mean_wait_s"] > 0
    assert all(node["finished_per_s"] > 0 for node in status["nodes"])
    cluster.go("end")
    cluster.finish()


def test_errors_are_shown_with_the_node_that_logged_them(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster, port = make(make_cluster)
    cluster.start_server()
    for rank in range(WORKERS):
        cluster.start_worker(rank, "lifecycle:disagreeing")
    cluster.wait_mark("done", range(WORKERS))
    status = wait_for(port, lambda s: any(e["node"] == "server 0" for e in s["errors"]))
    [error] = [e for e in status["errors"] if e["node"] == "server 0"]
    assert "workers disagree on a tensor" in error["text"]
    cluster.go("end")


def test_a_node_that_is_silent_is_shown_so(make_cluster: Callable[..., Cluster]) -> None:
    cluster, port = make(make_cluster, BYTEPS_PEER_TIMEOUT_S="12")
    server = cluster.start_server()
    wait_for(port, lambda s: s["servers"]["active"] == 1)
    stop(server)
    status = wait_for(port, lambda s: s["nodes"][0]["state"] == "silent")
    assert status["nodes"][0]["silent_s"] > 4
    server.send(signal.SIGCONT)
    wait_for(port, lambda s: s["nodes"][0]["state"] == "active")


# Metrics: the values that Prometheus gets from workers and servers match the job.


Figures = dict[str, float]


def scrape(port: int) -> Figures:
    """Return all metrics as name{labels} -> value."""
    url = f"http://{LOOPBACK}:{port}/metrics"
    with urllib.request.urlopen(url, timeout=END_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def of(figures: Figures, role: str, rank: int) -> Figures:
    """Return the metrics of a process by their bare names; those of engine threads are summed."""
    by_name: Figures = {}
    for key, value in figures.items():
        name, _, labels = key.partition("{")
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if name.startswith("byteps_") and "le" not in pairs:
            assert (pairs["role"], pairs["rank"]) == (role, str(rank)), key
            name = name.removeprefix(f"byteps_{role}_")
            by_name[name] = by_name.get(name, 0.0) + value
    return by_name


def make_with_metrics(
    make_cluster: Callable[..., Cluster], program: str, **args: Any
) -> tuple[Cluster, int]:
    """Start a cluster with metrics: its workers serve them at the port and the next one, its server
    at the third."""
    port = free_ports(WORKERS + 1)
    env = {
        "BYTEPS_METRICS_PORT": str(port),
        "BYTEPS_HTTP_HOST": LOOPBACK,
        "BYTEPS_PARTITION_BYTES": "4096",
        # The server's local rank, which chooses its port. Workers have LOCAL_RANK for this.
        "BYTEPS_LOCAL_RANK": str(WORKERS),
    }
    cluster = make_cluster(workers=WORKERS, servers=1, env=env)
    cluster.start_nodes()
    for rank in range(WORKERS):
        cluster.start_worker(rank, program, env={"BYTEPS_LOCAL_RANK": None}, **args)
    return cluster, port


def test_metrics_of_a_known_job(make_cluster: Callable[..., Cluster]) -> None:
    cluster, port = make_with_metrics(make_cluster, "lifecycle:known")
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
    # A round is closed shortly after its last answer.
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
    assert len(engines) == 4  # The default of BYTEPS_SERVER_ENGINE_THREAD.
    endless = [value for name, value in figures.items() if 'le="+Inf"' in name and "byteps" in name]
    assert endless == [ROUNDS * PARTITIONS]
    cluster.go("end")
    cluster.finish()


def test_what_waits_is_seen(make_cluster: Callable[..., Cluster]) -> None:
    """If other workers wait for a worker, their queues and the server's open rounds show it."""
    cluster, port = make_with_metrics(make_cluster, "lifecycle:waiting")
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
    cluster, port = make_with_metrics(make_cluster, "lifecycle:disagreeing")
    cluster.wait_mark("done", range(WORKERS))
    assert of(scrape(port + WORKERS), "server", 0)["refused_requests_total"] >= 1
    counts = [int(note.read_text()) for note in cluster.folder.glob("refused.*")]
    assert counts
    assert all(count >= 1 for count in counts)
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
    cluster.start_worker(0, "lifecycle:known", env=nowhere)
    cluster.wait_mark("done", [0])
    assert of(scrape(port), "worker", 0)["operations_total"] == 2 * ROUNDS
    ranks = sorted(rank for rank in range(2) for at in (1, 2) if is_server(scrape(port + at), rank))
    assert ranks == [0, 1]
    cluster.go("end")
    cluster.finish()


def is_server(figures: Figures, rank: int) -> bool:
    return f'byteps_server_sums_total{{role="server",rank="{rank}"}}' in figures


def test_half_requests_delay_no_scrape(make_cluster: Callable[..., Cluster]) -> None:
    """Unauthenticated clients connect and do not finish their requests."""
    cluster, port = make_with_metrics(make_cluster, "lifecycle:known")
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
    """Metrics are served at no other address, since that might lead to another network."""
    port = free_ports(2)
    host = "127.0.0.2"
    env = {"BYTEPS_METRICS_PORT": str(port), "DMLC_NODE_HOST": host, "BYTEPS_LOCAL_RANK": "1"}
    cluster = make_cluster(workers=1, servers=1, env=env)
    cluster.start_nodes()
    cluster.start_worker(0, "lifecycle:known", env={"BYTEPS_LOCAL_RANK": None})
    cluster.wait_mark("done", [0])
    for at in (port, port + 1):
        for served in (LOOPBACK, host):
            socket.create_connection((served, at), timeout=END_S).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", at), timeout=END_S)
    cluster.go("end")
    cluster.finish()
