"""A reader of the log that reads no more stops neither a server nor its end."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multiproc.cluster import END_S, START_S, Cluster, server_executable, wait_for_file

LOUD = {"BYTEPS_LOG_LEVEL": "DEBUG", "PS_VERBOSE": "2", "BYTEPS_PEER_TIMEOUT_S": "5"}


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, int]]:
    """Its ends; not one byte more fits in."""
    reader, writer = os.pipe()
    flags = fcntl.fcntl(writer, fcntl.F_GETFL)
    fcntl.fcntl(writer, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    try:
        while True:
            os.write(writer, b"x")
    except BlockingIOError:
        pass
    fcntl.fcntl(writer, fcntl.F_SETFL, flags)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def start(
    cluster: Cluster, role: str, stderr: int, port_file: Path | None = None
) -> subprocess.Popen[bytes]:
    arguments = ["--port-file", str(port_file)] if port_file is not None else []
    return subprocess.Popen(
        [server_executable(), "--role", role, "--die-with-parent", *arguments],
        env=cluster.node_environment(), stdin=subprocess.DEVNULL, stderr=stderr,
    )  # fmt: skip


@pytest.fixture
def stalled(
    make_cluster: Callable[..., Cluster], full_pipe: tuple[int, int]
) -> Iterator[tuple[Cluster, subprocess.Popen[bytes]]]:
    """A job of one worker that sums; of its server nobody reads the log."""
    cluster = make_cluster(workers=1, servers=1, env=LOUD)
    cluster.start_scheduler()
    server = start(cluster, "server", full_pipe[1])
    yield cluster, server
    if server.poll() is None:
        server.kill()
    server.wait(END_S)


def test_a_job_goes_on(stalled: tuple[Cluster, subprocess.Popen[bytes]]) -> None:
    cluster, server = stalled
    cluster.start_worker(0, "observed:known")
    cluster.wait_mark("done", [0])
    cluster.go("end")
    assert cluster.workers["worker 0"].wait(END_S) == 0
    assert server.wait(END_S) == 0
    cluster.demand_checks()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it(
    stalled: tuple[Cluster, subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    cluster, server = stalled
    cluster.start_worker(0, "failures:loop")
    cluster.wait_mark("looping", [0])
    server.send_signal(number)
    assert server.wait(END_S) == 128 + number


def test_a_scheduler_with_a_full_pipe(
    make_cluster: Callable[..., Cluster], full_pipe: tuple[int, int]
) -> None:
    """It listens, admits, and tells a late reader what it said."""
    cluster = make_cluster(workers=1, servers=1)
    reader, writer = full_pipe
    port_file = cluster.folder / "port"
    scheduler = start(cluster, "scheduler", writer, port_file)
    try:
        cluster.port = int(wait_for_file(port_file, START_S).split()[1])
        cluster.start_server()
        cluster.start_worker(0, "observed:known")
        cluster.wait_mark("done", [0])
        text = b""
        while b"the job is complete" not in text:
            text += os.read(reader, 4096)
        assert b"INFO scheduler 0" in text and b"dropped" not in text
        cluster.go("end")
        assert scheduler.wait(END_S) == 0
    finally:
        if scheduler.poll() is None:
            scheduler.kill()
        scheduler.wait(END_S)
