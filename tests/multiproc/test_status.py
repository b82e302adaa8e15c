"""The scheduler's status: what it shows of a cluster is what the cluster does."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from scripts.ports import free_ports
from tests.multiproc.cluster import (
    END_S,
    LOOPBACK,
    REPOSITORY,
    RUN_S,
    START_S,
    Cluster,
    clean_environment,
    server_executable,
    stop,
)
from tests.multiproc.programs.observed import LARGE, PARTITIONS, ROUNDS, SMALL

STATUS = REPOSITORY / "scripts/status.sh"
WORKERS = 2
BYTES = 4 * (LARGE + SMALL)
# Heartbeats every sixth of it.
QUICK = {"BYTEPS_PEER_TIMEOUT_S": "3", "BYTEPS_PARTITION_BYTES": "4096"}


def get(port: int, path: str, method: str = "GET") -> tuple[int, str, str]:
    """Status, type and body of the answer."""
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
    """The first status for which `holds`."""
    deadline = time.monotonic() + RUN_S
    while time.monotonic() < deadline:
        status = status_of(port)
        if holds(status):
            return status
        time.sleep(0.05)
    raise AssertionError(f"it never came; the last: {json.dumps(status, indent=1)}")


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
        cluster.start_worker(rank, "observed:known")
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


def test_what_is_served(make_cluster: Callable[..., Cluster]) -> None:
    cluster, port = make(make_cluster)
    code, kind, page = get(port, "/")
    assert (code, kind) == (200, "text/html; charset=utf-8")
    # Nothing is loaded from elsewhere.
    assert not re.findall(r"https?://|src=|@import", page)
    assert get(port, "/nothing")[0] == 404
    assert get(port, "/status", "POST")[0] == 405
    cluster.start_server()
    wait_for(port, lambda s: s["servers"]["active"] == 1)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [STATUS, *words], env=clean_environment(cluster.folder), capture_output=True, text=True,
            check=False, timeout=START_S,
        )  # fmt: skip

    said = run(f"{LOOPBACK}:{port}")
    assert said.returncode == 0, said.stderr
    assert "job gathering" in said.stdout and "0 of 2 workers, 1 of 1 servers" in said.stdout
    assert re.search(rf"^server 0 +{LOOPBACK}:\d+ ", said.stdout, re.M)
    assert json.loads(run(f"{LOOPBACK}:{port}", "--json").stdout)["state"] == "gathering"
    # What answers there is no scheduler's page.
    wrong = run(f"{LOOPBACK}:{cluster.port}")
    assert wrong.returncode == 1
    assert "no scheduler shows its status" in wrong.stderr
    for words in ([], ["here"], ["a:b"], ["--what"], ["h:1", "h:2"]):
        assert run(*words).returncode == 2, words


def test_the_slowest_worker_and_the_rates(make_cluster: Callable[..., Cluster]) -> None:
    cluster, port = make(make_cluster)
    cluster.start_server()
    for rank in range(WORKERS):
        cluster.start_worker(rank, "observed:straggling")
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
        cluster.start_worker(rank, "observed:disagreeing")
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


def test_a_port_that_is_taken_is_refused(make_cluster: Callable[..., Cluster]) -> None:
    cluster, port = make(make_cluster)
    second = subprocess.run(
        [server_executable(), "--role", "scheduler"],
        env={**cluster.node_environment(), "DMLC_PS_ROOT_PORT": "0"},
        capture_output=True, text=True, check=False, timeout=START_S,
    )  # fmt: skip
    assert second.returncode == 2
    assert f"BYTEPS_STATUS_PORT={port}: cannot listen at {LOOPBACK}:{port}" in second.stderr
