"""What a process that is not part of a job can say to its nodes, byte for byte.

Written from the description in net/tcp/wire.h and net/link/meta_codec.cc, on purpose not from
the code.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.multiproc.cluster import END_S, SECRET

MAGIC = 0x5350424D
VERSION = 5
EMPTY = 2**31 - 1
"""A node id that has not been given yet."""
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
    """What shows that `who` ("connects" or "listens") has the secret, after `said` was said."""
    key = hmac.digest(secret.encode(), _PURPOSE, "sha256")
    return hmac.digest(key, who.encode() + b"\0" + said, "sha256")


class TooLate(Exception):
    """The node closed the connection, since it did not hear everything in time."""


@contextmanager
def greeted(
    address: tuple[str, int], hello: Hello, secret: str, timeout_s: float = END_S
) -> Iterator[tuple[socket.socket, str]]:
    """A connection that has said hello and proved the secret, and the refusal, or "".

    Connects again when that took too long, as nodes do.
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
    """All that the node says to this; it is asked again when it did not hear that in time."""
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
    """Say hello and prove the secret, and demand a proof; the refusal, or ""."""
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
    """So many bytes; raises TooLate when the other side closes before."""
    said = stranger.recv(count, socket.MSG_WAITALL)
    if len(said) < count:
        raise TooLate(f"{len(said)} of {count} bytes came")
    return said


def read_refusal(stranger: socket.socket, answer: bytes) -> bytes:
    (length,) = struct.unpack_from("<H", answer, 6)
    return stranger.recv(length, socket.MSG_WAITALL) if length else b""


def meta(*, command: int = 0, head: int = 0, key: int = 0, body: bytes = b"") -> bytes:
    """A message's meta with no nodes."""
    fixed = struct.pack("<BBBii", 3, 1, command, head, 0)
    return fixed + struct.pack("<QQII", key, 1, len(body), 0) + body


def frame(packed_meta: bytes, value: bytes | None = None, received: int = 0) -> bytes:
    sizes = b"" if value is None else struct.pack("<Q", len(value))
    values = 0 if value is None else 1
    head = struct.pack("<BBHIQ", 1, values, 0, len(packed_meta), received)
    return head + sizes + packed_meta + (value or b"")


def read_all(stranger: socket.socket) -> bytes:
    """Until the other side closes, as it must within the socket's timeout."""
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
    """The reason in an answer of `fixed` bytes and a reason; "" if there is none."""
    if len(said) < fixed:
        return ""
    magic, _, length = struct.unpack_from("<IHH", said)
    assert magic == MAGIC
    return said[fixed : fixed + length].decode()


def job_of(address: tuple[str, int]) -> int:
    """The job's number, which the scheduler tells every peer that connects."""
    deadline = time.monotonic() + END_S
    while True:
        with socket.create_connection(address, timeout=END_S) as stranger:
            stranger.sendall(Hello(sender=0x77).encode())
            try:
                return struct.unpack_from("<Q", receive(stranger, CHALLENGE_BYTES), 8)[0]
            except (TooLate, ConnectionError):
                assert time.monotonic() < deadline, f"{address} closes every connection"
