"""What an all-reduce costs on the links, in closed form; docs/design/cost-model.md derives it.

Training decides by these functions how each bucket of gradients is summed, and the benchmark holds
what it measures against them. Everything here is arithmetic and needs no other module: links that
carry their rate in each direction at once, a switch that is never the limit, additions and messages
that cost nothing.

:func:`core_seconds` counts CPU time.
Unless stated otherwise, ``workers`` (n) are the members of the all-reduce, each with a NIC of its
own, ``servers`` (k) the machines that add, ``size`` (M) the bytes of the tensor on one worker and
``rate`` (B) the bytes per second that a link carries each way. Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


def ring(workers: int, size: float, rate: float) -> float:
    """2(n-1)/n * M/B: reduce-scatter, then all-gather, each n-1 steps of M/n bytes."""
    _check(workers=workers, servers=None, size=size, rate=rate)
    return 2 * (workers - 1) / workers * size / rate


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


# -------------------------------------------------------------- several ranks behind one NIC


@dataclass(frozen=True, kw_only=True)
class Load:
    """Bytes that the busiest NIC of each kind carries in its busier direction."""

    host: float
    """Of a host with workers, and the servers on it."""
    server: float = 0.0
    """Of a server on a machine of its own."""

    def seconds(self, host_rate: float, server_rate: float) -> float:
        """When the last byte has passed, for NICs of these bytes per second each way."""
        return max(self.host / host_rate, self.server / server_rate)


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The servers of a job, and how bytes are dealt to them."""

    hosts: int
    """With workers. All of them push at the same time."""
    extra: int
    """Machines of their own with servers."""
    local: int = 0
    """Server processes on each of the hosts with workers."""
    per_machine: int = 1
    """Server processes on each machine of its own."""

    def __post_init__(self) -> None:
        counts = (self.hosts - 1, self.extra, self.local, self.per_machine - 1)
        if min(counts) < 0 or not self.count:
            raise ValueError(f"there must be a host and a server at least: {self}")

    @property
    def count(self) -> int:
        """Server processes. Each gets as many bytes."""
        return self.extra * self.per_machine + self.local * self.hosts

    def shares(self) -> Shares:
        """What a machine and a host get, with all processes on it."""
        return Shares(extra=self.per_machine / self.count, beside=self.local / self.count)


def best_servers(hosts: int, extra: int, within: float = 1.03) -> Servers:
    """How many server processes to start on each machine, so that every NIC is busy.

    A process gets as many bytes as any other, so that their numbers on the two kinds of machine
    stand for :func:`best_shares`. The fewest processes are taken that are within that part of the
    best time: 3 on each of 2 machines and 1 on each of 4 hosts, for example.
    """
    best = both_kinds(hosts, extra, 1.0, 1.0) if extra else ring(hosts, 1.0, 1.0)
    choices = [
        Servers(hosts=hosts, extra=extra, local=local, per_machine=per_machine)
        for per_machine in range(1, 17 if extra else 2)
        for local in range(0 if extra else 1, 9)
    ]
    good = [
        one for one in choices if push_pull(one, 1.0, 1.0).seconds(1.0, 1.0) <= within * best + 1e-9
    ]
    return min(
        good or choices,
        key=lambda one: one.count if good else push_pull(one, 1.0, 1.0).seconds(1.0, 1.0),
    )


def push_pull(servers: Servers, pushed: float, pulled: float) -> Load:
    """The load of a push-pull: the ranks of each host together push and pull so many bytes.

    A server with the part x of the tensor receives x * pushed from every host and sends
    x * pulled to each. What a worker and a server on one host exchange does not pass its NIC.
    """
    shares, others = servers.shares(), servers.hosts - 1
    own = shares.beside
    out = pushed * (1 - own) + pulled * own * others
    into = pulled * (1 - own) + pushed * own * others
    extra = servers.hosts * shares.extra * max(pushed, pulled) if servers.extra else 0.0
    return Load(host=max(out, into), server=extra)


# ------------------------------------------------------------------------- cores and NICs

TCP_GBPS = 100.0
"""The fastest link, in Gbit/s, that TCP is for: none faster was measured, and at that rate a server
spends 12 cores on it. Above it RDMA, where the NIC moves the bytes."""
TCP_CORE_RATE = 20e9 / 8
"""Bytes per second that one core sends or receives over TCP."""
ADD_CORE_RATE = 6e9
"""Bytes of pushes per second that one core of a server adds."""


@dataclass(frozen=True, kw_only=True)
class CoreSeconds:
    """CPU time of one push-pull, on one machine of each kind."""

    host: float
    """Of a host with workers, and the servers on it."""
    server: float = 0.0
    """Of a machine with servers only."""


def core_seconds(
    servers: Servers,
    pushed: float,
    pulled: float,
    *,
    core_rate: float = TCP_CORE_RATE,
    add_rate: float = ADD_CORE_RATE,
) -> CoreSeconds:
    """The CPU time of a push-pull: the ranks of each host together push and pull these bytes.

    A worker sends what it pushes and receives what it pulls. A server with the part x of the tensor
    receives and adds x * pushed from every host, and sends x * pulled to each. What a worker and a
    server on one host exchange costs their cores as much as anything else.

    Args:
        core_rate: bytes per second that a core sends or receives; infinite with RDMA.
        add_rate: bytes per second that a core adds.
    """
    shares = servers.shares()
    moved = (pushed + pulled) / core_rate
    serving = servers.hosts * (moved + pushed / add_rate)
    return CoreSeconds(host=moved + shares.beside * serving, server=shares.extra * serving)


def reduce_scatters(groups: Iterable[Sequence[int]], size: float) -> Load:
    """The load of reduce-scatters of torch.distributed (or all-gathers), all at the same time.

    A ring visits the members of a host one after the other, so that (m-1)/m of the tensor leaves
    each host, for m members; nothing does where all are on one host.

    Args:
        groups: of each ring, the host of every member.
        size: bytes of the tensor on one member.
    """
    return _leaving(groups, size, lambda members: (len(members) - 1) / len(members))


def all_reduces(groups: Iterable[Sequence[int]], size: float) -> Load:
    """The load of all-reduces of torch.distributed, all at the same time; arguments as above.

    2(h-1)/h of the tensor leaves each of h hosts: what NCCL needs at its best, by trees or by rings
    that sum inside the host first. A flat ring (gloo's) needs 2(m-1)/m.
    """
    return _leaving(groups, size, lambda members: 2 * (len(set(members)) - 1) / len(set(members)))


def _leaving(
    groups: Iterable[Sequence[int]], size: float, part: Callable[[Sequence[int]], float]
) -> Load:
    sent: dict[int, float] = {}
    for members in groups:
        hosts = set(members)
        if len(hosts) > 1:
            leaving = part(members) * size
            for host in hosts:
                sent[host] = sent.get(host, 0.0) + leaving
    return Load(host=max(sent.values(), default=0.0))


def _check(*, workers: int, servers: int | None, size: float, rate: float) -> None:
    if workers < 1:
        raise ValueError(f"{workers} workers: there must be one at least")
    if servers is not None and servers < 1:
        raise ValueError(f"{servers} servers: there must be one at least")
    if not size >= 0 or not 0 < rate < math.inf:
        raise ValueError(f"{size} bytes at {rate} bytes/s: neither may be negative, nor the rate 0")
