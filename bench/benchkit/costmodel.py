"""What a sum over workers costs on the links, in closed form; docs/cost-model.md derives it.

Everything here is arithmetic: links that carry their rate in each direction at once, a switch that
is never the limit, additions and messages that cost nothing. ``benchkit.simulation`` predicts what
partitions, credits, latency and the servers' additions cost on top.

In all functions ``workers`` (n) are the members of the sum, ``servers`` (k) the machines that add,
``size`` (M) the bytes of the tensor on one worker and ``rate`` (B) the bytes per second that a link
carries each way. Times are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def ring(workers: int, size: float, rate: float) -> float:
    """2(n-1)/n * M/B: reduce-scatter, then all-gather, each n-1 steps of M/n bytes."""
    _check(workers=workers, servers=None, size=size, rate=rate)
    return 2 * (workers - 1) / workers * size / rate


def own_machines(workers: int, servers: int, size: float, rate: float) -> float:
    """max(M/B, n*M/(k*B)): servers on machines of their own.

    A worker sends M bytes and receives M at the same time. Each of k servers receives its share,
    M/k, from n workers, and sends as much.
    """
    _check(workers=workers, servers=servers, size=size, rate=rate)
    return max(1.0, workers / servers) * size / rate


def colocated(workers: int, size: float, rate: float) -> float:
    """2(n-1)/n * M/B: a server on every worker's host and nowhere else, as long as a ring.

    A host sends its worker's pushes to the other servers, (n-1)/n * M, and its server's answers to
    the other workers, as much again.
    """
    return ring(workers, size, rate)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How the bytes are dealt to servers of two kinds."""

    extra: float
    """Part of the tensor that each machine of its own sums."""
    beside: float
    """Part of the tensor that the server on each worker's host sums."""


def best_shares(workers: int, servers: int) -> Shares:
    """The shares that end both kinds of machine at the same time.

    Let each of k extra machines sum x and each of n hosts y, kx + ny = 1. An extra machine sends
    n*x*M. A host sends its worker's pushes, all but its own share, (1-y)*M, and its server's
    answers to the n-1 others, (n-1)*y*M. Both take as long when n*x = 1 + (n-2)*y, so
    y = (n-k) / (n^2 + kn - 2k) and x = 2(n-1) / (n^2 + kn - 2k). From k = n on the hosts need not
    help: y = 0, x = 1/k.
    """
    _check(workers=workers, servers=servers or None, size=1.0, rate=1.0)
    if servers >= workers:
        return Shares(extra=1 / servers, beside=0.0)
    whole = workers**2 + servers * workers - 2 * servers
    return Shares(extra=2 * (workers - 1) / whole, beside=(workers - servers) / whole)


def both_kinds(workers: int, servers: int, size: float, rate: float) -> float:
    """2n(n-1)/(n^2 + kn - 2k) * M/B up to k = n, then M/B: k machines and all n hosts serve.

    The time of both kinds of machine under ``best_shares``; no other shares are faster, since any
    that relieve one kind load the other.
    """
    _check(workers=workers, servers=servers or None, size=size, rate=rate)
    shares = best_shares(workers, servers)
    return max(workers * shares.extra, 1 + (workers - 2) * shares.beside) * size / rate


def gain(workers: int, servers: int) -> float:
    """1 + k(n-2)/n^2 for k <= n: the ring's time over that of ``both_kinds``.

    1 at n = 2, where a ring also sends M bytes each way; 2(n-1)/n at k = n, so at most 2.
    """
    _check(workers=workers, servers=servers or None, size=1.0, rate=1.0)
    return 1 + min(servers, workers) * (workers - 2) / workers**2


def partitions_fill(workers: int, servers: int, partition: float, rate: float) -> float:
    """max(n, k)*P/B: what partitions of P bytes add to the time of servers on their own machines.

    A worker sends to k servers, a server receives from n workers, at B/max(n, k) each; so the first
    sums can come back after max(n, k)*P/B, and the last ones, which are complete when all pushes
    are, take as long. For partitions of equal size, as many on each server.
    """
    _check(workers=workers, servers=servers, size=partition, rate=rate)
    return max(workers, servers) * partition / rate


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A way to get summed gradients, or what replaces them, to every rank."""

    name: str
    passes: tuple[float, ...]
    """Bytes of an element in each pass over the parameters."""
    through_servers: bool
    """Each pass moves (n-1)/n of its bytes in a ring; all of them through servers."""

    def bytes_per_parameter(self, workers: float = math.inf) -> float:
        """Bytes that one rank sends (and receives) for a parameter; in the limit by default."""
        part = 1.0 if self.through_servers or math.isinf(workers) else (workers - 1) / workers
        return sum(self.passes) * part


SCHEMES = (
    Scheme(name="ring, fp32", passes=(4, 4), through_servers=False),
    Scheme(name="distributed optimizer, bf16", passes=(2, 2), through_servers=False),
    Scheme(name="parameter servers, fp32", passes=(4,), through_servers=True),
    Scheme(name="parameter servers, bf16", passes=(2,), through_servers=True),
)
"""Gradients reduced and gathered in fp32; gradients reduced and parameters gathered in bf16;
gradients pushed, while sums are pulled in the other direction, in fp32 or bf16."""


def _check(*, workers: int, servers: int | None, size: float, rate: float) -> None:
    if workers < 1:
        raise ValueError(f"{workers} workers: there must be one at least")
    if servers is not None and servers < 1:
        raise ValueError(f"{servers} servers: there must be one at least")
    if not size >= 0 or not 0 < rate < math.inf:
        raise ValueError(f"{size} bytes at {rate} bytes/s: neither may be negative, nor the rate 0")
