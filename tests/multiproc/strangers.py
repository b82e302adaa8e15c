"""What a process that is not part of a job can say to its nodes, byte for byte.

Written from the description in src/tcp/wire.h and src/meta_codec.cc, on purpose not from the code.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

MAGIC = 0x5350424D
VERSION = 2
EMPTY = 2**31 - 1
"""A node id that has not been given yet."""
ADD_NODE, JOB_FAILED = 2, 13
REPLY_BYTES = 24


@dataclass(frozen=True, kw_only=True)
class Hello:
    job: int = 0
    sender: int = 0x1234
    receiver: int = 0
    node_id: int = EMPTY
    index: int = 0
    version: int = VERSION

    def encode(self) -> bytes:
        head = struct.pack("<IHH", MAGIC, self.version, self.index)
        return head + struct.pack("<QQQiI", self.job, self.sender, self.receiver, self.node_id, 0)


def meta(*, command: int = 0, head: int = 0, key: int = 0, body: bytes = b"") -> bytes:
    """A message's meta with no nodes."""
    fixed = struct.pack("<BBBii", 2, 1, command, head, 0)
    return fixed + struct.pack("<QQII", key, 1, len(body), 0) + body


def frame(packed_meta: bytes, value: bytes | None = None) -> bytes:
    sizes = b"" if value is None else struct.pack("<Q", len(value))
    values = 0 if value is None else 1
    head = struct.pack("<BBHI", 1, values, 0, len(packed_meta))
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


def refusal(said: bytes) -> str:
    """The reason in a reply to a hello; "" if it was taken or there was no reply."""
    if len(said) < REPLY_BYTES:
        return ""
    magic, _, length = struct.unpack_from("<IHH", said)
    assert magic == MAGIC
    return said[REPLY_BYTES : REPLY_BYTES + length].decode()


def job_of(address: tuple[str, int]) -> int:
    """The job's number, which the scheduler tells whoever connects."""
    with socket.create_connection(address, timeout=60) as stranger:
        stranger.sendall(Hello(sender=0x77).encode())
        reply = stranger.recv(REPLY_BYTES, socket.MSG_WAITALL)
    return struct.unpack_from("<Q", reply, 8)[0]
