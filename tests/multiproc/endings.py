"""Helpers that break a cluster (lost processes and connections, spares) and check that it ends in
time, with an error that has the reason."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.multiproc.cluster import (
    END_S,
    IMPORT_S,
    RUN_S,
    Cluster,
    Nursed,
    Process,
    Spawned,
    wait_all,
    wait_for_file,
)


def start_looping(
    make: Callable[..., Cluster], env: Mapping[str, str], *, workers: int, servers: int
) -> Cluster:
    """Start a cluster whose workers sum in a loop, until a test ends them."""
    cluster = make(workers=workers, servers=servers, env=env)
    cluster.start("failures:loop")
    cluster.wait_mark("looping", range(workers))
    return cluster


def lose(cluster: Cluster, lost: str) -> list[Nursed]:
    """Kill the second worker, the first server or the scheduler. Return the surviving workers once
    they have ended."""
    workers = list(cluster.workers.values())
    victims: dict[str, Process] = {
        "worker": workers[1],
        "server": cluster.servers[0],
        "scheduler": cluster.scheduler,
    }
    victims[lost].send(signal.SIGKILL)
    survivors = [worker for worker in workers if worker is not victims[lost]]
    wait_all(survivors, END_S)
    return survivors


_LEAKS = re.compile(r"^nanobind: leaked .*?/refleaks\.html$", re.MULTILINE | re.DOTALL)
"""Report that follows a traceback, about objects of Triton that were not freed."""


def last_words(worker: Nursed) -> str:
    """Return the worker's output up to the last line of its traceback."""
    return _LEAKS.sub("", worker.text).rstrip()


def error_of(worker: Nursed) -> str:
    """Return the worker's last error: the line after its traceback."""
    return re.split(r"^[\w.]+Error:", last_words(worker), flags=re.MULTILINE)[-1].strip()


def demand_error(worker: Nursed, *patterns: str) -> None:
    assert worker.wait(END_S) == 1, f"{worker.title}: exit status {worker.status}"
    last = last_words(worker).rpartition("\n")[2]
    assert re.search(r"BytePS\w*Error:", last), f"{worker.title} did not end by BytePSError: {last}"
    text = error_of(worker)
    for pattern in patterns:
        assert re.search(pattern, text), f"{worker.title}: {pattern!r} is not in {text!r}"


def demand_failed(node: Spawned, *patterns: str) -> None:
    """Require that a scheduler or server exits with 1 and has the reason on stderr."""
    assert node.wait(END_S) == 1, node.text
    for pattern in patterns:
        assert re.search(pattern, node.text), f"{node.title}: {pattern!r} is not in {node.text!r}"


def wait_for_text(node: Spawned, pattern: str) -> None:
    """Wait until the node's log has a line that matches the pattern (a regex)."""
    deadline = time.monotonic() + END_S
    while not re.search(pattern, node.text):
        assert time.monotonic() < deadline, f"{pattern!r} is not in {node.text!r}"
        assert node.running, node.text
        time.sleep(0.02)


AT_ONCE = {"BYTEPS_STOP_TIMEOUT_S": "0.5"}
"""Setting with which a scheduler or server does not wait for its workers after SIGTERM."""


# Jobs with a spare server for a lost one.


WAIT = {"BYTEPS_REPLACE_SERVERS_S": "60"}


def wait_done(cluster: Cluster, step: int) -> None:
    """Wait until worker 0 has made this many steps."""
    workers = list(cluster.workers.values())
    path = cluster.folder / "done.0"
    wait_for_file(path, IMPORT_S, workers)
    end = time.monotonic() + RUN_S
    while int(path.read_text() or 0) < step:
        assert all(worker.running for worker in workers), workers[0].text[-3000:]
        assert time.monotonic() < end, f"step {step} was not made"
        time.sleep(0.01)


def wait_for_count(node: Process, text: str, times: int = 1) -> None:
    end = time.monotonic() + RUN_S
    while node.text.count(text) < times:
        assert node.running and time.monotonic() < end, node.text[-3000:]
        time.sleep(0.02)


def start_with_spare(cluster: Cluster, **args: object) -> list[Nursed]:
    """Start a cluster, and a spare server once all ranks of servers are taken."""
    workers = cluster.start("lost_servers:train", **args)
    wait_done(cluster, 1)
    wait_for_count(cluster.start_server(), "waiting for the place of a server")
    return workers


COPIES = {**WAIT, "BYTEPS_BACKUP_STATE": "1"}
COPIED = "has a copy of this server's state"


def await_copies(cluster: Cluster) -> None:
    """Wait until servers have copies of each other's state, then start a spare."""
    wait_done(cluster, 1)
    for server in cluster.servers:
        wait_for_count(server, COPIED)
    wait_for_count(cluster.start_server(), "waiting for the place of a server")


# Jobs whose scheduler dies and is replaced.


RETURNS = {"BYTEPS_SCHEDULER_RETURN_S": "120"}
GOES_ON = "goes on with the job of another one that died"


def kill_scheduler(cluster: Cluster) -> None:
    cluster.scheduler.send(signal.SIGKILL)
    assert cluster.scheduler.wait(RUN_S) == -signal.SIGKILL


def others(cluster: Cluster) -> list[Process]:
    """Return all nodes except the scheduler."""
    return [*cluster.workers.values(), *cluster.servers]


def replace_scheduler(cluster: Cluster, number: int, step: int) -> None:
    """Kill the scheduler for the `number`-th time while workers hold at `step`. Start the next
    scheduler while they hold ten steps later, and then let them continue."""
    wait_done(cluster, step)
    kill_scheduler(cluster)
    for node in others(cluster):
        wait_for_count(node, "and the job goes on meanwhile", number)
    cluster.go(str(step))
    wait_done(cluster, step + 10)  # Sums do not need the scheduler.
    cluster.start_scheduler()
    wait_for_count(cluster.scheduler, GOES_ON, number)
    for node in others(cluster):
        wait_for_count(node, "is there again after", number)
    cluster.go(str(step + 10))


# TCP sockets of another process, and ways to break them as a network would.


_PIDFD_GETFD = 438
"""Number of the system call on x86-64 and arm64."""
_ESTABLISHED = "01"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Socket:
    pid: int
    fd: int
    local: int
    """Local port."""
    remote: int

    def reset(self) -> None:
        """Reset the connection at both ends, like a firewall that has dropped its state.

        Disconnecting a socket sends a reset at once, and leaves the descriptor open in its owner.
        """
        with self._taken() as taken:
            unspecified = struct.pack("=H14x", socket.AF_UNSPEC)
            if _libc.connect(taken.fileno(), unspecified, len(unspecified)) != 0:
                error = ctypes.get_errno()
                raise OSError(error, f"disconnecting: {os.strerror(error)}")

    def close(self) -> None:
        """Close the connection for both ends, as a proxy that ends does."""
        with self._taken() as taken:
            taken.shutdown(socket.SHUT_RDWR)

    def insert(self, said: bytes) -> None:
        """Insert bytes into the stream that the other end reads, like a peer in the middle."""
        with self._taken() as taken:
            taken.send(said, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def waiting(self, most: int) -> bytes:
        """Return received bytes that the owner has not read, without consuming them."""
        with self._taken() as taken:
            try:
                return taken.recv(most, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return b""

    def _taken(self) -> socket.socket:
        """Duplicate the socket into this process."""
        pidfd = os.pidfd_open(self.pid)
        try:
            copy = _libc.syscall(_PIDFD_GETFD, pidfd, self.fd, 0)
        finally:
            os.close(pidfd)
        if copy < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"pidfd_getfd: {os.strerror(error)}")
        return socket.socket(fileno=copy)


def connections_of(pid: int) -> list[Socket]:
    """Return its connected TCP sockets."""
    by_inode = {}
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _ESTABLISHED:
                ports = [int(end.rpartition(":")[2], 16) for end in fields[1:3]]
                by_inode[fields[9]] = ports
    sockets = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith("socket:[") and target[8:-1] in by_inode:
            local, remote = by_inode[target[8:-1]]
            sockets.append(Socket(pid=pid, fd=int(entry.name), local=local, remote=remote))
    return sockets
