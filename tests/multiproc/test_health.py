"""byteps-server --health: what a container's health check hears."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multiproc.cluster import (
    END_S,
    START_S,
    Cluster,
    Spawned,
    clean_environment,
    server_executable,
    stop,
)


def ask(socket: Path | str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [server_executable(), "--health"],
        env={**os.environ, "BYTEPS_HEALTH_SOCKET": str(socket), **env},
        capture_output=True, text=True, check=False, timeout=START_S,
    )  # fmt: skip


def start(cluster: Cluster, title: str, *command: str, socket: Path) -> Spawned:
    env = {**cluster.node_environment(), "BYTEPS_HEALTH_SOCKET": str(socket)}
    return Spawned(title, [server_executable(), *command], env, cluster.folder)


def wait_for(socket: Path, text: str, process: Spawned) -> str:
    """The answer, once it has `text`."""
    for _ in range(600):
        said = ask(socket)
        if said.returncode == 0 and text in said.stdout:
            return said.stdout
        assert process.running, process.text
    raise AssertionError(f"never said {text!r}; the last: {said}")


def test_from_waiting_to_serving_to_gone(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=1, servers=1, env={"BYTEPS_PARTITION_BYTES": "4096"})
    cluster.start_scheduler()
    socket = cluster.folder / "health"
    server = start(cluster, "server", "--role", "server", socket=socket)
    cluster.servers.append(server)
    # Alone it waits, and is well.
    assert wait_for(socket, "server", server) == "server waits for the job to gather\n"
    worker = cluster.start_worker(0, "observed:known")
    cluster.wait_mark("done", [0])
    said = wait_for(socket, "server 0 serves", server)
    # Three rounds of three partitions and of one.
    assert "byteps_server_sums_total=12 " in said
    cluster.go("end")
    assert worker.wait(END_S) == 0
    assert server.wait(END_S) == 0
    assert not socket.exists()
    gone = ask(socket)
    assert gone.returncode == 1
    assert f"nobody answers at {socket}" in gone.stderr


def test_a_process_that_hangs_is_not_well(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=1, servers=1)
    cluster.start_scheduler()
    socket = cluster.folder / "health"
    server = start(cluster, "server", "--role", "server", socket=socket)
    cluster.servers.append(server)
    wait_for(socket, "server", server)
    stop(server)
    said = ask(socket)
    server.send(signal.SIGCONT)
    assert said.returncode == 1
    assert f"no answer from {socket} in time" in said.stderr


def test_a_socket_that_was_left_behind_is_taken_over(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=1, servers=1)
    cluster.start_scheduler()
    socket = cluster.folder / "health"
    first = start(cluster, "first", "--role", "server", socket=socket)
    cluster.servers.append(first)
    wait_for(socket, "server", first)
    second = start(cluster, "second", "--role", "server", socket=socket)
    cluster.servers.append(second)
    assert second.wait(END_S) == 2
    assert f"BYTEPS_HEALTH_SOCKET='{socket}' is in use" in second.text
    first.send(signal.SIGKILL)
    first.wait(END_S)
    assert socket.exists()
    # In a job of its own: in the first one the server that was killed has its place for a while.
    other = make_cluster(workers=1, servers=1)
    other.start_scheduler()
    third = start(other, "third", "--role", "server", socket=socket)
    other.servers.append(third)
    wait_for(socket, "server", third)


@pytest.mark.parametrize(
    ("path", "complaint"),
    [("/nonexistent/health", "No such file"), ("/tmp/" + "x" * 200, "longer than")],
    ids=["no folder", "too long"],
)
def test_a_bad_path_is_refused(tmp_path: Path, path: str, complaint: str) -> None:
    cluster = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9", "DMLC_NUM_WORKER": "1"}
    done = subprocess.run(
        [server_executable(), "--role", "server"],
        env={
            **clean_environment(tmp_path),
            **cluster,
            "DMLC_NUM_SERVER": "1",
            "BYTEPS_HEALTH_SOCKET": path,
        },
        capture_output=True, text=True, check=False, timeout=START_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "BYTEPS_HEALTH_SOCKET" in done.stderr and complaint in done.stderr


def test_asking_needs_a_socket() -> None:
    said = ask("")
    assert said.returncode == 2
    assert "--health needs BYTEPS_HEALTH_SOCKET" in said.stderr
