"""Ports that a process binds later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"


def free_ports(count: int = 1, host: str = LOOPBACK) -> int:
    """The first of ``count`` ports in a row that nobody listens at, at this address of the machine.

    None of those that the kernel gives on a request for any port: a node of the job itself might
    get it before the one that it is for.
    """
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8")
    lowest = int(given.split()[0])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        port = random.randrange(min(10_000, lowest // 2), lowest - count)
        try:
            for number in range(port, port + count):
                socket.create_server((host, number), family=family).close()
        except OSError:
            continue
        return port
