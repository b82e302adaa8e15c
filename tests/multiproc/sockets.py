"""The TCP sockets of another process, and their breaking as the network would break them."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_PIDFD_GETFD = 438
"""The number of the system call, on x86-64 and arm64."""
_ESTABLISHED = "01"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Socket:
    pid: int
    fd: int
    local: int
    """Its port."""
    remote: int

    def reset(self) -> None:
        """Both ends find their connection reset, as by a firewall that has forgotten it.

        To disconnect a socket sends a reset at once, and leaves the descriptor to its owner.
        """
        with self._taken() as taken:
            unspecified = struct.pack("=H14x", socket.AF_UNSPEC)
            if _libc.connect(taken.fileno(), unspecified, len(unspecified)) != 0:
                error = ctypes.get_errno()
                raise OSError(error, f"disconnecting: {os.strerror(error)}")

    def close(self) -> None:
        """Both ends read that the other has closed, as by a proxy that ends."""
        with self._taken() as taken:
            taken.shutdown(socket.SHUT_RDWR)

    def insert(self, said: bytes) -> None:
        """The other end reads this amid what the owner sends it, as if by somebody in between."""
        with self._taken() as taken:
            taken.send(said, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def waiting(self, most: int) -> bytes:
        """What has come and the owner has not read; it stays there."""
        with self._taken() as taken:
            try:
                return taken.recv(most, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return b""

    def _taken(self) -> socket.socket:
        """The same socket, in this process."""
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
    """Its TCP sockets that are connected."""
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
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith("socket:[") and target[8:-1] in by_inode:
            local, remote = by_inode[target[8:-1]]
            found.append(Socket(pid=pid, fd=int(entry.name), local=local, remote=remote))
    return found
