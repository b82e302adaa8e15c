"""Messages of an unauthenticated peer, byte for byte. As a program: thousands of such peers, which
repeatedly connect to a port and do not prove that they have the secret.

The messages follow the description in net/tcp/wire.h and net/link/meta_codec.cc. They deliberately
do not use that code. The program runs until its stdin closes, then prints its counts as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import ipaddress
import itertools
import json
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.multiproc.cluster import END_S, SECRET

MAGIC = 0x5350424D
VERSION = 5
EMPTY = 2**31 - 1
"""Node id of a node that has not been assigned one."""
ADD_NODE, JOB_FAILED = 2, 13
SERVER, WORKER, SCHEDULER = 0, 1, 2
CHALLENGE_BYTES, REPLY_BYTES, PROOF_BYTES = 96, 48, 32
_PURPOSE = b"Megatron-BytePS: authentication of connections, 1"


@dataclass(frozen=True, kw_only=True)
class Hello:
    job: int = 0
    sender: int = 0x1234
    receiver: int = 0
    node_id: int = EMPTY
    rank: int = 0
    role: int = WORKER
    index: int = 0
    version: int = VERSION
    authenticates: bool = True
    resumes: bool = False
    received: int = 0
    nonce: bytes = b"n" * 32

    def encode(self) -> bytes:
        head = struct.pack("<IHH", MAGIC, self.version, self.index)
        flags = self.authenticates | self.resumes << 1
        who = struct.pack("<QQQii", self.job, self.sender, self.receiver, self.node_id, self.rank)
        return (
            head + who + struct.pack("<BBHIQ", self.role, flags, 0, 0, self.received) + self.nonce
        )


def proof(secret: str, who: str, said: bytes) -> bytes:
    """Return the bytes by which `who` ("connects" or "listens") proves to have the secret, for the
    greetings `said`."""
    key = hmac.digest(secret.encode(), _PURPOSE, "sha256")
    return hmac.digest(key, who.encode() + b"\0" + said, "sha256")


class TooLate(Exception):
    """Raised if the node closed the connection because a message was late."""


@contextmanager
def greeted(
    address: tuple[str, int], hello: Hello, secret: str, timeout_s: float = END_S
) -> Iterator[tuple[socket.socket, str]]:
    """Context with an authenticated connection, and the text of the refusal, or "".

    Reconnects if authentication took too long, as nodes do.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with socket.create_connection(address, timeout=timeout_s) as stranger:
            try:
                refused = greet(stranger, hello, secret)
            except (TooLate, ConnectionError):
                assert time.monotonic() < deadline, f"{address} closes every connection"
                continue
            yield stranger, refused
            return


def answer_to(said: bytes, address: tuple[str, int], timeout_s: float = END_S) -> bytes:
    """Return the node's whole answer to these bytes. Send them again if they arrived too late."""
    deadline = time.monotonic() + timeout_s
    while True:
        with socket.create_connection(address, timeout=timeout_s) as stranger:
            try:
                stranger.sendall(said)
            except ConnectionError:
                answer = b""
            else:
                answer = read_all(stranger)
        if answer:
            return answer
        assert time.monotonic() < deadline, f"{address} answers nothing"


def greet(stranger: socket.socket, hello: Hello, secret: str) -> str:
    """Send hello and a proof, and check the peer's proof. Return the refusal, or ""."""
    stranger.sendall(hello.encode())
    challenge = receive(stranger, CHALLENGE_BYTES)
    if text := refusal(challenge + read_refusal(stranger, challenge), CHALLENGE_BYTES):
        return text
    said = hello.encode() + challenge[8 : CHALLENGE_BYTES - PROOF_BYTES]
    assert challenge[-PROOF_BYTES:] == proof(SECRET, "listens", said)
    stranger.sendall(proof(secret, "connects", said))
    reply = receive(stranger, REPLY_BYTES)
    return refusal(reply + read_refusal(stranger, reply), REPLY_BYTES)


def receive(stranger: socket.socket, count: int) -> bytes:
    """Receive `count` bytes. Raise TooLate if the other side closes earlier."""
    said = stranger.recv(count, socket.MSG_WAITALL)
    if len(said) < count:
        raise TooLate(f"the connection closed after {len(said)} of {count} bytes")
    return said


def read_refusal(stranger: socket.socket, answer: bytes) -> bytes:
    (length,) = struct.unpack_from("<H", answer, 6)
    return stranger.recv(length, socket.MSG_WAITALL) if length else b""


def meta(*, command: int = 0, head: int = 0, key: int = 0, body: bytes = b"") -> bytes:
    """Encode a message's meta without nodes."""
    fixed = struct.pack("<BBBii", 3, 1, command, head, 0)
    return fixed + struct.pack("<QQII", key, 1, len(body), 0) + body


def frame(packed_meta: bytes, value: bytes | None = None, received: int = 0) -> bytes:
    sizes = b"" if value is None else struct.pack("<Q", len(value))
    values = 0 if value is None else 1
    head = struct.pack("<BBHIQ", 1, values, 0, len(packed_meta), received)
    return head + sizes + packed_meta + (value or b"")


def read_all(stranger: socket.socket) -> bytes:
    """Read until the other side closes, which must happen within the socket's timeout."""
    said = b""
    while True:
        try:
            part = stranger.recv(65536)
        except ConnectionResetError:
            return said
        if not part:
            return said
        said += part


def refusal(said: bytes, fixed: int = CHALLENGE_BYTES) -> str:
    """Return the reason in an answer of `fixed` bytes and a reason; "" if there is none."""
    if len(said) < fixed:
        return ""
    magic, _, length = struct.unpack_from("<IHH", said)
    assert magic == MAGIC
    return said[fixed : fixed + length].decode()


def job_of(address: tuple[str, int]) -> int:
    """Return the job's number, which the scheduler sends to every peer that connects."""
    deadline = time.monotonic() + END_S
    while True:
        with socket.create_connection(address, timeout=END_S) as stranger:
            stranger.sendall(Hello(sender=0x77).encode())
            try:
                return struct.unpack_from("<Q", receive(stranger, CHALLENGE_BYTES), 8)[0]
            except (TooLate, ConnectionError):
                assert time.monotonic() < deadline, f"{address} closes every connection"


# Thousands of unauthenticated peers, which repeatedly connect to a port and do not prove that they
# have the secret.


TICK_S = 0.01
KINDS = ("silent", "talking")
"""Kinds of peers: one sends nothing, the other sends hello and no proof."""
TIMEOUT_S = 60
FILES_OF_ITS_OWN = 64


@dataclass(frozen=True, kw_only=True)
class Plan:
    address: tuple[str, int]
    kind: str = "silent"
    burst: int = 0
    """Number of initial connections; later ones follow at `rate`."""
    rate: float = 1000.0
    """Connections per second."""
    sources: int = 0
    """Number of unused addresses in 127.0.0.0/8 from which to connect, or 0 for the default
    address."""
    most: int = 12_000
    """Largest number of open connections."""


class Flood:
    """A process that executes a plan, as a context manager."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self._log = folder / "flood.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        host, port = self.plan.address
        words = [f"--{name}={getattr(self.plan, name)}" for name in _NUMBERS]
        command = [sys.executable, __file__, f"{host}:{port}", f"--kind={self.plan.kind}", *words]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        return self

    def wait_ready(self) -> None:
        """Wait until the burst is connected."""
        assert self._process is not None and self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", self._log.read_text()

    def stop(self) -> dict[str, int]:
        """Stop and return counts: connections `opened`, `closed` by the other end, and failures to
        `connect`."""
        assert self._process is not None
        said, _ = self._process.communicate(timeout=TIMEOUT_S)
        assert self._process.returncode == 0, self._log.read_text()
        return json.loads(said.splitlines()[-1])

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


_NUMBERS = ("burst", "rate", "sources", "most")


class _Flooder:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._epoll = select.epoll()
        self._open: dict[int, socket.socket] = {}
        self._sources = _sources(plan.sources)
        self.done = {"opened": 0, "closed": 0, "connect": 0}
        self._ready = False
        self._began = time.monotonic()
        self._hello = Hello().encode()

    def run(self) -> None:
        self._epoll.register(sys.stdin.fileno(), select.EPOLLIN | select.EPOLLHUP)
        while self._serve(TICK_S):
            for _ in range(self._due()):
                self._connect()
            if not self._ready and self._is_ready():
                self._ready = True
                print("ready", flush=True)

    def _due(self) -> int:
        """Return the number of connections to make now."""
        plan = self._plan
        since = time.monotonic() - self._began
        due = plan.burst + int(since * plan.rate) - self.done["opened"]
        return max(0, min(due, 500, plan.most - len(self._open)))

    def _is_ready(self) -> bool:
        return self.done["opened"] >= max(self._plan.burst, 1)

    def _connect(self) -> None:
        self.done["opened"] += 1
        family = socket.AF_INET6 if ":" in self._plan.address[0] else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        if self._sources:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_BIND_ADDRESS_NO_PORT, 1)
            connection.bind((next(self._sources), 0))
        try:
            with contextlib.suppress(BlockingIOError):
                connection.connect(self._plan.address)
        except OSError:
            self.done["connect"] += 1
            connection.close()
            return
        self._open[connection.fileno()] = connection
        events = select.EPOLLIN | select.EPOLLRDHUP
        if self._plan.kind == "talking":
            events |= select.EPOLLOUT
        self._epoll.register(connection, events)

    def _serve(self, wait_s: float) -> bool:
        """Handle events; return False after the signal to stop."""
        for number, events in self._epoll.poll(wait_s):
            if number == sys.stdin.fileno():
                return False
            connection = self._open[number]
            try:
                if events & select.EPOLLIN and not connection.recv(65536):
                    raise ConnectionResetError
                if events & (select.EPOLLERR | select.EPOLLHUP):
                    raise ConnectionResetError
                if events & select.EPOLLOUT:
                    connection.send(self._hello)
                    self._epoll.modify(number, select.EPOLLIN | select.EPOLLRDHUP)
            except BlockingIOError:
                continue
            except OSError:
                self.done["closed"] += 1
                self._epoll.unregister(number)
                self._open.pop(number).close()
        return True


def _sources(count: int) -> Iterator[str] | None:
    if count == 0:
        return None
    first = int(ipaddress.IPv4Address("127.77.0.1"))
    return itertools.cycle(str(ipaddress.IPv4Address(first + i)) for i in range(count))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="HOST:PORT")
    parser.add_argument("--kind", choices=KINDS, default="silent")
    for name in _NUMBERS:
        kind = float if name == "rate" else int
        parser.add_argument(f"--{name}", type=kind, default=getattr(Plan, name))
    arguments = vars(parser.parse_args())
    host, _, port = arguments.pop("address").rpartition(":")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    arguments["most"] = min(arguments["most"], hard - FILES_OF_ITS_OWN)
    flooder = _Flooder(Plan(address=(host, int(port)), **arguments))
    flooder.run()
    print(json.dumps(flooder.done), flush=True)
    os._exit(0)  # This is faster than closing all connections one by one.


if __name__ == "__main__":
    sys.exit(main())
