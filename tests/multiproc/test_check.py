"""byteps-server --check and --health: problems found before a start, and the state of a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from scripts.children import captured, free_ports
from tests.multiproc.cluster import (
    END_S,
    LOOPBACK,
    START_S,
    Cluster,
    Spawned,
    server_executable,
    stop,
)

USAGE = 2
NO_SCHEDULER = 3
TAKEN = "(the number of a port that another process has)"
HAS_RDMA = any(Path("/sys/class/infiniband").glob("*"))


def run(
    cluster: Cluster, *arguments: str, env: Mapping[str, str | None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run byteps-server with the settings of `cluster` and with these. None: the variable is not
    set."""
    changed = {**cluster.node_environment(), "BYTEPS_START_TIMEOUT_S": "3", **(env or {})}
    return captured(
        [server_executable(), *arguments],
        START_S,
        env={name: value for name, value in changed.items() if value is not None},
    )


def check(
    cluster: Cluster, role: str, count: int = 1, **env: str | None
) -> subprocess.CompletedProcess[str]:
    return run(cluster, f"--check={count}", "--role", role, env=env)


def demand_wrong(said: subprocess.CompletedProcess[str], status: int, *texts: str) -> None:
    assert said.returncode == status, said
    [wrong] = [line for line in said.stdout.splitlines() if line.startswith("WRONG ")]
    for text in texts:
        assert text in wrong, said


@pytest.fixture
def taken() -> Iterator[str]:
    """A port of loopback that is in use."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        yield str(listener.getsockname()[1])


@pytest.fixture
def gathering(make_cluster: Callable[..., Cluster]) -> Cluster:
    """A scheduler for two workers and two servers, which are not started."""
    cluster = make_cluster(workers=2, servers=2)
    cluster.start_scheduler()
    return cluster


@pytest.mark.parametrize(
    ("role", "env", "status", "texts"),
    [
        ("server", {"BYTEPS_IO_THREADS": "x"}, USAGE, ["BYTEPS_IO_THREADS='x'"]),
        ("server", {"DMLC_ENABLE_RDMA": "roce"}, USAGE, ["DMLC_ENABLE_RDMA='roce'", "ibverbs"]),
        pytest.param(
            *("server", {"DMLC_ENABLE_RDMA": "ibverbs"}, 1, ["RDMA cannot be used on this host"]),
            marks=pytest.mark.skipif(HAS_RDMA, reason="this host has RDMA"),
        ),
        (
            *("server", {"DMLC_ENABLE_RDMA": "ibverbs", "BYTEPS_TLS": "1"}, USAGE),
            ["BYTEPS_TLS=1", "DMLC_ENABLE_RDMA"],
        ),
        ("server", {"BYTEPS_SECRET": "another secret, as long"}, 1, ["BYTEPS_SECRET"]),
        ("server", {"BYTEPS_SECRET": None}, USAGE, ["BYTEPS_SECRET_FILE"]),
        ("server", {"BYTEPS_TLS": "1"}, 1, ["BYTEPS_TLS=1"]),
        ("server", {"DMLC_NUM_WORKER": "3"}, 1, ["started for 3 workers", "DMLC_NUM_WORKER"]),
        ("server", {"DMLC_NUM_SERVER": "5"}, 1, ["started for 5 servers", "DMLC_NUM_SERVER"]),
        ("server", {"BYTEPS_NODE_PORT": TAKEN}, 1, ["BYTEPS_NODE_PORT", "already in use"]),
        ("server", {"DMLC_NODE_HOST": "203.0.113.7"}, 1, ["DMLC_NODE_HOST", "203.0.113.7"]),
        ("server", {"DMLC_INTERFACE": "nosuch0"}, 1, ["nosuch0"]),
        ("server", {"BYTEPS_METRICS_PORT": TAKEN}, USAGE, ["BYTEPS_METRICS_PORT"]),
        ("server", {"BYTEPS_HEALTH_SOCKET": "/nowhere/at/all"}, USAGE, ["BYTEPS_HEALTH_SOCKET"]),
        ("server", {"BYTEPS_HEALTH_SOCKET": "/tmp/" + "x" * 200}, USAGE, ["longer than"]),
        (
            *("server", {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_DIR": "/proc/nowhere"}, USAGE),
            ["BYTEPS_TRACE_DIR"],
        ),
        ("server", {"DMLC_PS_ROOT_URI": "no.such.host.invalid"}, 1, ["no.such.host.invalid"]),
        ("server", {"DMLC_PS_ROOT_URI": None}, USAGE, ["DMLC_PS_ROOT_URI"]),
        ("server", {"DMLC_PS_ROOT_PORT": "0"}, USAGE, ["DMLC_PS_ROOT_PORT"]),
        ("scheduler", {"DMLC_PS_ROOT_PORT": TAKEN}, 1, ["DMLC_PS_ROOT_PORT", "already in use"]),
        ("scheduler", {"BYTEPS_STATUS_PORT": TAKEN}, USAGE, ["BYTEPS_STATUS_PORT"]),
        ("scheduler", {"DMLC_NUM_SERVER": None}, USAGE, ["DMLC_NUM_SERVER"]),
        ("scheduler", {"DMLC_ENABLE_RDMA": "1", "BYTEPS_TLS": "1"}, USAGE, ["BYTEPS_TLS=1"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_check_finds_the_start_finds(
    gathering: Cluster,
    taken: str,
    role: str,
    env: dict[str, str | None],
    status: int,
    texts: list[str],
) -> None:
    env = {name: taken if value == TAKEN else value for name, value in env.items()}
    if role == "scheduler":  # The running scheduler has the port.
        env = {"DMLC_PS_ROOT_PORT": "0", **env}
    demand_wrong(run(gathering, "--check", "--role", role, env=env), status, *texts)
    started = run(gathering, "--role", role, env=env)
    assert started.returncode == status, started
    for text in texts:
        assert text in started.stderr, started


def test_a_scheduler_that_is_not_there(make_cluster: Callable[..., Cluster], taken: str) -> None:
    cluster = make_cluster(workers=1, servers=1)
    cluster.port = 1
    said = check(cluster, "server")
    demand_wrong(said, NO_SCHEDULER, "the scheduler (127.0.0.1:1)", "start it first")
    # Checks that need no scheduler have run. The program that listens at the port does not count as
    # a scheduler.
    assert "ok    it can listen at 127.0.0.1:" in said.stdout
    cluster.port = int(taken)
    demand_wrong(check(cluster, "worker"), NO_SCHEDULER, f"127.0.0.1:{taken}")
    # A local problem has priority over one of the scheduler.
    demand_wrong(check(cluster, "server", BYTEPS_IO_THREADS="x"), USAGE, "BYTEPS_IO_THREADS")
    assert check(cluster, "server", DMLC_NODE_HOST="203.0.113.7").returncode == 1


def test_a_bad_check_prints_its_usage(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=1, servers=1)
    for count in ("0", "-1", "x", ""):
        said = run(cluster, f"--check={count}", "--role", "server")
        assert said.returncode == USAGE and f"--check={count}" in said.stderr, said
    said = run(cluster, "--role", "worker")
    assert said.returncode == USAGE and "--role worker is not allowed" in said.stderr, said


def test_a_job_that_gathers_and_runs(gathering: Cluster) -> None:
    """Checks do not disturb the job, which gathers and ends well."""
    cluster = gathering
    ok = "ok    the scheduler would admit"
    assert f"{ok} this server: 0 of 2 servers and 0 of 2 workers" in check(cluster, "server").stdout
    assert f"{ok} 2 servers of this machine" in check(cluster, "server", 2).stdout
    demand_wrong(check(cluster, "server", 3), 1, "room for 2 more servers, and this machine has 3")
    workers = {"RANK": "0", "WORLD_SIZE": "2", "DMLC_NUM_WORKER": None}
    assert f"{ok} 2 workers of this machine" in check(cluster, "worker", 2, **workers).stdout
    demand_wrong(check(cluster, "worker", 3, **workers), 1, "rank 2 is not below the number")
    cluster.start_server()
    cluster.start_server()
    first = cluster.start_worker(1, "lifecycle:known")
    limit = time.monotonic() + 120
    while cluster.scheduler.text.count(" joined: ") < 3 and time.monotonic() < limit:
        time.sleep(0.05)
    demand_wrong(
        check(cluster, "worker", RANK="1", WORLD_SIZE="2"), 1, "has a worker 1 (127.0.0.1) already"
    )
    assert check(cluster, "worker", RANK="0", WORLD_SIZE="2").returncode == 0
    # any free rank
    assert check(cluster, "worker", 1).returncode == 0
    demand_wrong(check(cluster, "worker", 2), 1, "room for 1 more worker, and this machine has 2")
    demand_wrong(check(cluster, "server"), 1, "the job has its 2 servers already")
    cluster.start_worker(0, "lifecycle:known")
    cluster.wait_mark("done", [0, 1])
    assert first.running
    demand_wrong(check(cluster, "server"), 1, "2 of 2 servers and 2 of 2 workers are there")
    demand_wrong(check(cluster, "worker", RANK="0", WORLD_SIZE="2"), 1, "has a worker 0")
    cluster.go("end")
    cluster.finish()
    # The log shows no trace of the checks.
    assert cluster.scheduler.text.count(" joined: ") == 4
    assert "WARNING" not in cluster.scheduler.text, cluster.scheduler.text


def test_counts_of_a_probe_are_forgotten(make_cluster: Callable[..., Cluster]) -> None:
    """A kept scheduler takes its counts from the first worker that joins, not from a check."""
    cluster = make_cluster(workers=2, servers=1, env={"BYTEPS_KEEP": "1"})
    cluster.start_scheduler()
    assert check(cluster, "worker", RANK="4", DMLC_NUM_WORKER="7").returncode == 0
    cluster.start_server()
    for rank in range(2):
        cluster.start_worker(rank, "lifecycle:known")
    cluster.wait_mark("done", [0, 1])
    cluster.go("end")
    cluster.finish()


def test_a_scheduler_that_could_run_is_not_reached(make_cluster: Callable[..., Cluster]) -> None:
    """The check of a scheduler leaves the port free, and does not answer a node that waits for the
    real scheduler."""
    cluster = make_cluster(workers=1, servers=1)
    cluster.port = free_ports()
    server = cluster.start_server()
    for _ in range(5):
        said = check(cluster, "scheduler")
        assert said.returncode == 0, said
        assert f"ok    it can listen at 127.0.0.1:{cluster.port}" in said.stdout
    assert server.running, server.text
    assert "admitted" not in server.text
    server.send(signal.SIGKILL)
    server.wait(END_S)


def test_servers_that_would_listen_at_one_port(gathering: Cluster) -> None:
    said = check(gathering, "server", 2, BYTEPS_NODE_PORT="45678")
    assert said.returncode == USAGE
    assert "BYTEPS_NODE_PORT=45678 is one port, and 2 servers" in said.stdout


def test_the_port_file(gathering: Cluster, tmp_path: Path) -> None:
    where = str(tmp_path / "no" / "port")
    said = run(gathering, "--check", "--role", "server", "--port-file", where)
    demand_wrong(said, 1, f"--port-file {where}")
    assert not (tmp_path / "no").exists()


# byteps-server --health: the answer to a container's health check.


def ask(socket: Path | str, **env: str) -> subprocess.CompletedProcess[str]:
    return captured(
        [server_executable(), "--health"],
        START_S,
        env={**os.environ, "BYTEPS_HEALTH_SOCKET": str(socket), **env},
    )


def start_with_socket(cluster: Cluster, title: str, *command: str, socket: Path) -> Spawned:
    env = {**cluster.node_environment(), "BYTEPS_HEALTH_SOCKET": str(socket)}
    return Spawned(title, [server_executable(), *command], env, cluster.folder)


def wait_to_hear(socket: Path, text: str, process: Spawned) -> str:
    """Wait until the answer has `text`; return it."""
    for _ in range(600):
        said = ask(socket)
        if said.returncode == 0 and text in said.stdout:
            return said.stdout
        assert process.running, process.text
    raise AssertionError(f"no answer had {text!r}; the last answer: {said}")


def test_from_waiting_to_serving_to_gone(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=1, servers=1, env={"BYTEPS_PARTITION_BYTES": "4096"})
    cluster.start_scheduler()
    socket = cluster.folder / "health"
    server = start_with_socket(cluster, "server", "--role", "server", socket=socket)
    cluster.servers.append(server)
    # A process that is alone waits, and counts as healthy.
    assert wait_to_hear(socket, "server", server) == "server waits for the job to gather\n"
    worker = cluster.start_worker(0, "lifecycle:known")
    cluster.wait_mark("done", [0])
    said = wait_to_hear(socket, "server 0 serves", server)
    # There are three rounds, of three partitions and of one.
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
    server = start_with_socket(cluster, "server", "--role", "server", socket=socket)
    cluster.servers.append(server)
    wait_to_hear(socket, "server", server)
    stop(server)
    said = ask(socket)
    server.send(signal.SIGCONT)
    assert said.returncode == 1
    assert f"no answer from {socket} in time" in said.stderr


def test_a_socket_that_was_left_behind_is_taken_over(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=1, servers=1)
    cluster.start_scheduler()
    socket = cluster.folder / "health"
    first = start_with_socket(cluster, "first", "--role", "server", socket=socket)
    cluster.servers.append(first)
    wait_to_hear(socket, "server", first)
    second = start_with_socket(cluster, "second", "--role", "server", socket=socket)
    cluster.servers.append(second)
    assert second.wait(END_S) == 2
    assert f"BYTEPS_HEALTH_SOCKET='{socket}' is in use" in second.text
    first.send(signal.SIGKILL)
    first.wait(END_S)
    assert socket.exists()
    # A second job is used, because in the first one the killed server keeps its rank for a while.
    other = make_cluster(workers=1, servers=1)
    other.start_scheduler()
    third = start_with_socket(other, "third", "--role", "server", socket=socket)
    other.servers.append(third)
    wait_to_hear(socket, "server", third)


def test_asking_needs_a_socket() -> None:
    said = ask("")
    assert said.returncode == 2
    assert "--health needs BYTEPS_HEALTH_SOCKET" in said.stderr
