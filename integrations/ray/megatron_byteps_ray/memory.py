"""Training state in the memory of actors, which outlive the ranks that it belongs to.

A rank hands its actor a *snapshot*: the bytes of its training state after a step. The actor keeps
it, and sends a copy to a peer's actor, on another machine if there is one. When both have it all,
the rank is told so. The driver compares what all actors have: a step whose snapshots are whole on
every rank makes the older ones needless.

Rank and actor speak over a Unix socket without a name in any folder. A rank sends one JSON line,
``{"do": "keep", "step": N}`` and chunks, or ``{"do": "fetch", "step": N}``, for which it gets
chunks. A chunk is its length, 8 bytes, and its bytes. One of length 0 is the end: without it a
snapshot does not count, since the rank may have been killed while it sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BufferedRWPair
from typing import Any

CHUNK_BYTES = 32 << 20
VARIABLE = "MEGATRON_BYTEPS_MEMORY"
"""Tells a rank, in JSON: ``socket``, ``interval`` and ``restore`` (a step, or null)."""
_LENGTH = struct.Struct("!Q")


@dataclass
class _Snapshot:
    chunks: list[bytes] = field(default_factory=list)
    whole: bool = False


class Snapshots:
    """The snapshots that an actor holds: its own rank's, and copies of a peer's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int, int], _Snapshot] = {}
        self._life = ("", -1)

    def begin(self, job: str, number: int, step: int | None) -> None:
        """An incarnation starts from this step (None: from none of these); drop all others."""
        with self._lock:
            self._life = (job, number)
            self._drop(lambda key: key[0] != job or key[2] != step)

    def add(
        self, job: str, number: int | None, rank: int, step: int, index: int, chunk: bytes
    ) -> None:
        """Take a chunk of a snapshot; an empty one ends it.

        ``number`` is the incarnation whose snapshot it is. One that is over is not heard, since
        ranks do those steps again. None: a snapshot from which the next one starts.
        """
        with self._lock:
            if number is not None and (job, number) != self._life:
                return
            key = (job, rank, step)
            if index == 0:
                self._held[key] = _Snapshot()
            snapshot = self._held[key]
            if chunk:
                snapshot.chunks.append(chunk)
            else:
                snapshot.whole = True

    def drop_before(self, step: int) -> None:
        """Every rank has a whole snapshot of this step: older ones are needless."""
        with self._lock:
            self._drop(lambda key: key[2] < step)

    def _drop(self, needless: Callable[[tuple[str, int, int]], bool]) -> None:
        self._held = {key: one for key, one in self._held.items() if not needless(key)}

    def whole(self, job: str) -> dict[tuple[int, int], int]:
        """By rank and step: the bytes of each snapshot that is whole."""
        with self._lock:
            return {
                (rank, step): sum(map(len, one.chunks))
                for (of, rank, step), one in self._held.items()
                if of == job and one.whole
            }

    def chunks(self, job: str, rank: int, step: int) -> list[bytes]:
        """Of a whole snapshot. Raises LookupError where there is none."""
        with self._lock:
            snapshot = self._held.get((job, rank, step))
            if snapshot is None or not snapshot.whole:
                raise LookupError(f"no whole snapshot of rank {rank}, step {step}")
            return list(snapshot.chunks)


class Port:
    """Where an actor's rank hands in its snapshots, and fetches one."""

    def __init__(
        self, keep: Callable[[int, Iterator[bytes]], None], fetch: Callable[[int], list[bytes]]
    ) -> None:
        """``keep`` gets a step and its chunks, the empty one last; ``fetch`` returns a step's."""
        self._keep, self._fetch = keep, fetch
        # In no folder: nothing is left behind by an actor that is killed.
        self.name = f"megatron-byteps-ray-{os.getpid()}-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_address(self.name))
        self._listener.listen(4)
        threading.Thread(target=self._serve, name="snapshots", daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        # A rank that ends midway needs no answer, and its snapshot does not count.
        with connection, contextlib.suppress(ConnectionError, EOFError):
            if struct.unpack("3i", credentials)[1] != os.getuid():
                return
            with connection.makefile("rwb") as stream:
                asked = json.loads(stream.readline())
                if asked["do"] == "keep":
                    self._keep(asked["step"], _read_chunks(stream))
                    stream.write(b"kept\n")
                else:
                    for chunk in self._fetch(asked["step"]):
                        _write_chunk(stream, chunk)
                    _write_chunk(stream, b"")


def _address(name: str) -> str:
    return "\0" + name


def _read(stream: BufferedRWPair, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _read_chunks(stream: BufferedRWPair) -> Iterator[bytes]:
    """All chunks, the empty one too. Raises EOFError where that does not come."""
    while True:
        (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
        yield _read(stream, length)
        if length == 0:
            return


def _write_chunk(stream: BufferedRWPair, chunk: bytes | bytearray) -> None:
    stream.write(_LENGTH.pack(len(chunk)))
    stream.write(chunk)


class Keeper:
    """A rank's end of it: a file to write one snapshot to, in a ``with`` statement."""

    def __init__(self, name: str, step: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(_address(name))
        self._stream = self._socket.makefile("rwb")
        self._stream.write(json.dumps({"do": "keep", "step": step}).encode() + b"\n")
        self._pending = bytearray()

    def write(self, data: Any) -> int:
        """As a file's."""
        view = memoryview(data).cast("B")
        taken = 0
        while taken < len(view):
            part = view[taken : taken + CHUNK_BYTES - len(self._pending)]
            self._pending += part
            taken += len(part)
            if len(self._pending) == CHUNK_BYTES:
                _write_chunk(self._stream, self._pending)
                self._pending = bytearray()
        return len(view)

    def flush(self) -> None:
        """As a file's."""
        self._stream.flush()

    def finish(self) -> None:
        """Wait until actor and peer have it all. Raises EOFError where they do not."""
        if self._pending:
            _write_chunk(self._stream, self._pending)
        _write_chunk(self._stream, b"")
        self._stream.flush()
        if self._stream.readline() != b"kept\n":
            raise EOFError("the actor did not keep the snapshot")

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()
        self._socket.close()


def fetch(name: str, step: int) -> bytes:
    """In a rank: the bytes of its snapshot of this step.

    Raises:
        LookupError: its actor does not have it.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(_address(name))
        with connection.makefile("rwb") as stream:
            stream.write(json.dumps({"do": "fetch", "step": step}).encode() + b"\n")
            stream.flush()
            try:
                return b"".join(_read_chunks(stream))
            except EOFError:
                raise LookupError(f"the actor has no state of step {step}") from None
