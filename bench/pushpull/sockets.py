"""Plain sockets in the pattern of a push-pull: the limit that a transport over TCP can reach.

``bench/pushpull/sockets.cc`` moves the bytes; this module compiles it and calls it. Nothing is
summed and nothing is verified but the number of bytes.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.kit.plan import WIRE_BITS

_ROOT = Path(__file__).resolve().parents[2]
_SOURCE = Path(__file__).with_name("sockets.cc")
_LIMIT_S = 120.0


class SocketsError(Exception):
    """The program could not be built, or a connection broke; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What ``build`` made."""

    server: Path
    library: Path


def build(folder: Path = _ROOT / "build" / "bench") -> Program:
    """Compile the server and the workers' library, unless both are newer than the source.

    Raises:
        SocketsError: there is no compiler (g++, or what CXX names), or it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = Program(server=folder / "sockets", library=folder / "libsockets.so")
    common = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-Wall", "-Wextra", "-pthread"]
    for path, flags in ((program.server, []), (program.library, ["-shared", "-fPIC"])):
        if path.exists() and path.stat().st_mtime >= _SOURCE.stat().st_mtime:
            continue
        # Under a name of its own first: another benchmark may be running what is there.
        part = path.with_name(f"{path.name}.{os.getpid()}")
        _compile([*common, *flags, str(_SOURCE), "-o", str(part)])
        part.replace(path)
    return program


def _compile(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except OSError as error:
        raise SocketsError(f"{command[0]}: {error}: install g++, or set CXX") from error
    if done.returncode != 0:
        raise SocketsError(f"`{' '.join(command)}` failed:\n{done.stderr.strip()}")


class Sockets:
    """A worker's connections: a ``backends.Backend`` that sums nothing."""

    sums = False

    def __init__(self, *, library: str, servers: Sequence[str], flows: int) -> None:
        """Connect to every server, ``flows`` times each.

        Args:
            library: the path of the compiled library.
            servers: ``"address port"`` of each.

        Raises:
            SocketsError: a server cannot be reached.
        """
        self._calls = ctypes.CDLL(library, use_errno=True)
        self._calls.sockets_connect.restype = ctypes.c_void_p
        self._calls.sockets_push_pull.restype = ctypes.c_int64
        places = "\n".join(servers).encode()
        self._job = self._calls.sockets_connect(places, ctypes.c_size_t(flows))
        if not self._job:
            raise SocketsError(f"connecting to {servers}: {os.strerror(ctypes.get_errno())}")
        self._pushed = self._pulled = torch.empty(0, dtype=torch.uint8)

    def form(self, wire: str) -> str:
        return wire

    def reduce(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        """Move as many bytes as the tensors take in this wire type, out of the host's memory and
        into it.

        Raises:
            SocketsError: a connection broke.
        """
        bits = WIRE_BITS.get(wire)
        size = sum(
            tensor.nbytes if bits is None else round(tensor.numel() * bits / 8)
            for tensor in tensors
        )
        if self._pushed.nbytes < size:
            # Filled, so that the kernel has given every page.
            self._pushed = torch.ones(size, dtype=torch.uint8)
            self._pulled = torch.ones(size, dtype=torch.uint8)
        moved = self._calls.sockets_push_pull(
            ctypes.c_void_p(self._job),
            ctypes.c_void_p(self._pushed.data_ptr()),
            ctypes.c_void_p(self._pulled.data_ptr()),
            ctypes.c_size_t(size),
        )
        if moved != size:
            raise SocketsError(f"{label}: {os.strerror(ctypes.get_errno())}")

    def close(self) -> None:
        """Close the connections; the servers end when all workers have."""
        self._calls.sockets_close(ctypes.c_void_p(self._job))
