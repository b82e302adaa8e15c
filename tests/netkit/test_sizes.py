"""Links that drop large packets, or that have a very low rate."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import native
from tests.multiproc.cluster import (
    END_S,
    START_S,
    Spawned,
    clean_environment,
    wait_all,
    wait_for_file,
)
from tests.multiproc.endings import connections_of
from tests.netkit.switch import Rule, Switch

RECONNECT_S = 6.0
HERE, THERE = 0, 1
"""Indices of hosts: of the scheduler, the server and worker 0; of worker 1."""
ENV = {
    "BYTEPS_RECONNECT_TIMEOUT_S": f"{RECONNECT_S:g}",
    "BYTEPS_PARTITION_BYTES": "65536",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1",
    "WORLD_SIZE": "2",
}
LOST = (
    r"(server 0 \(.*\) was lost to worker 1|worker 1 was lost to server 0).*was made again, but of "
    r"\d+ bytes that were sent since none was acknowledged within 6\.0 s "
    r"\(BYTEPS_RECONNECT_TIMEOUT_S=6\)"
)
GIVEN_UP = r'was lost to worker 1 .* it refused .*: "this node has given the connection up"'
VANISH = "small packets pass .* large ones do not.*MTU"
LIMIT_S = 400
Start = Callable[..., list[Spawned]]


@pytest.fixture
def switch() -> Iterator[Switch]:
    with Switch(2) as made:
        yield made


@pytest.fixture
def start(switch: Switch, run_dir: Path) -> Iterator[Start]:
    """Start jobs of two workers; a call returns scheduler, server and workers."""
    folder = native.build("byteps-server", "sum_worker")
    processes: list[Spawned] = []

    def start_one(title: str, host: int, command: list[str], env: dict[str, str]) -> None:
        where = switch.hosts[host]
        full = {**clean_environment(run_dir), **ENV, **env, "DMLC_NODE_HOST": where.address}
        processes.append(Spawned(title, where.command(command), full, run_dir))

    def start_all(*options: str, env: dict[str, str] | None = None) -> list[Spawned]:
        port_file = run_dir / "scheduler.port"
        server = str(folder / "byteps-server")
        root = {"DMLC_PS_ROOT_URI": switch.hosts[HERE].address, "DMLC_PS_ROOT_PORT": "0"}
        root |= env or {}
        command = [server, "--role", "scheduler", "--port-file", str(port_file)]
        start_one("scheduler", HERE, command, root)
        root["DMLC_PS_ROOT_PORT"] = wait_for_file(port_file, START_S, processes).split()[1]
        command = [server, "--role", "server", "--port-file", str(run_dir / "server.port")]
        start_one("server 0", HERE, command, root)
        for rank, host in enumerate((HERE, THERE)):
            command = [str(folder / "sum_worker"), *options]
            start_one(f"worker {rank}", host, command, {**root, "RANK": str(rank)})
        return processes

    yield start_all
    for process in processes:
        if process.running:
            process.send(signal.SIGKILL)
            process.wait(END_S)


def wait_for_frames(switch: Switch, more: int, processes: list[Spawned]) -> None:
    """Wait until worker 1 has sent this many more frames."""
    target = switch.passed(THERE, HERE).carried + more
    deadline = time.monotonic() + START_S
    while switch.passed(THERE, HERE).carried < target:
        assert time.monotonic() < deadline, "the job stands still"
        assert all(process.running for process in processes)
        time.sleep(0.01)


@pytest.mark.requires("tap")
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("tls", ["0", "1"])
def test_large_packets_vanish(switch: Switch, start: Start, tls: str) -> None:
    """A tunnel or a switch can have a smaller MTU than the hosts without sending ICMP errors."""
    env = {"BYTEPS_TLS": tls, "BYTEPS_PEER_TIMEOUT_S": "60"}
    processes = start("--rounds", "1000000", "--bytes", "200000", env=env)
    wait_for_frames(switch, 500, processes)
    small = Rule(largest=700)
    switch.set_rule(THERE, HERE, small)
    switch.set_rule(HERE, THERE, small)
    begin = time.monotonic()
    wait_all(processes, END_S)
    taken = time.monotonic() - begin
    # The time of BYTEPS_RECONNECT_TIMEOUT_S, plus delays on a busy machine.
    assert taken < RECONNECT_S + 30
    for worker in processes[2:]:
        assert worker.wait(0) == 1, worker.text
        assert re.search(f"{LOST}|{GIVEN_UP}", worker.text), worker.text
    # An error explains the reason. It may be the error of the worker that gave up, or of the other
    # worker, because only the first had much to send.
    assert any(re.search(VANISH, process.text) for process in processes)


@pytest.mark.requires("tap")
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.thorough
def test_a_slow_link_lives(switch: Switch, start: Start, run_dir: Path) -> None:
    """At 5 kB/s a partition takes twice BYTEPS_RECONNECT_TIMEOUT_S. The job still ends well, also
    over a replaced connection."""
    reconnect_s = 15
    options = ("--rounds", "1", "--tensors", "1", "--bytes", "131072")
    env = {"BYTEPS_RECONNECT_TIMEOUT_S": str(reconnect_s), "BYTEPS_PARTITION_BYTES": "131072"}
    # There are few packets at once, so that none waits for long. A queue of many seconds is another
    # problem.
    route = ("ip", "route", "replace", "10.78.0.0/24", "dev", "eth0")
    switch.run_on(THERE, *route, "cwnd", "lock", "4", "initcwnd", "2")
    processes = start(*options, env={**env, "BYTEPS_PEER_TIMEOUT_S": "200"})
    switch.set_rule(THERE, HERE, Rule(bytes_per_s=5_000, queue_bytes=50_000))
    port = int(wait_for_file(run_dir / "server.port", START_S, processes).split()[1])
    wait_for_frames(switch, 30, processes)
    worker = processes[-1]
    for connection in connections_of(worker.pid):
        if connection.remote == port:
            connection.reset()
    begin = time.monotonic()
    wait_all(processes, LIMIT_S)
    assert {p.title: p.wait(0) for p in processes} == {p.title: 0 for p in processes}
    assert "made again" in worker.text
    assert time.monotonic() - begin > reconnect_s, "it was not slow"
