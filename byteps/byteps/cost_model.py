"""Time that an all-reduce needs on the links, in closed form; docs/design/cost-model.md derives it.

Training uses these functions to decide how each bucket of gradients is summed. The benchmark
compares its measurements with them. The model assumes that links carry their rate in both
directions at the same time, that the switch is never the limit, and that additions and messages
cost nothing. The module imports no other module of this project.

:func:`core_seconds` counts CPU time. Unless stated otherwise, ``workers`` (n) is the number of
members of the all-reduce, each with its own NIC, ``servers`` (k) the number of machines that add,
``size`` (M) the bytes of the tensor on one worker, and ``rate`` (B) the bytes per second of a link
in each direction. Times are in seconds.
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
    """Shares of the bytes for servers of two kinds."""

    extra: float
    """Fraction of the tensor that each extra server machine sums."""
    beside: float
    """Fraction of the tensor that the server on each worker's host sums."""


def best_shares(workers: int, servers: int) -> Shares:
    """Return the shares with which both kinds of machine finish at the same time.

    Let each of k extra machines sum x and each of n hosts y, kx + ny = 1. An extra machine sends
    n*x*M. A host sends its worker's pushes except its own share, (1-y)*M, and its server's answers
    to the n-1 others, (n-1)*y*M. Both finish at the same time when n*x = 1 + (n-2)*y, so y = (n-k)
    / (n^2 + kn - 2k) and x = 2(n-1) / (n^2 + kn - 2k). For k >= n the hosts need not help: y = 0, x
    = 1/k.
    """
    _check(workers=workers, servers=servers or None, size=1.0, rate=1.0)
    if servers >= workers:
        return Shares(extra=1 / servers, beside=0.0)
    whole = workers**2 + servers * workers - 2 * servers
    return Shares(extra=2 * (workers - 1) / whole, beside=(workers - servers) / whole)


def both_kinds(workers: int, servers: int, size: float, rate: float) -> float:
    """2n(n-1)/(n^2 + kn - 2k) * M/B up to k = n, then M/B: k machines and all n hosts serve.

    This is the time of both kinds of machine under ``best_shares``. No other shares are faster,
    since they load one of the kinds more.
    """
    _check(workers=workers, servers=servers or None, size=size, rate=rate)
    shares = best_shares(workers, servers)
    return max(workers * shares.extra, 1 + (workers - 2) * shares.beside) * size / rate


def gain(workers: int, servers: int) -> float:
    """1 + k(n-2)/n^2 for k <= n: the ring's time divided by that of ``both_kinds``.

    It is 1 at n = 2, where a ring also sends M bytes in each direction, and 2(n-1)/n at k = n, so
    at most 2.
    """
    _check(workers=workers, servers=servers or None, size=1.0, rate=1.0)
    return 1 + min(servers, workers) * (workers - 2) / workers**2


# -------------------------------------------------------------- several ranks behind one NIC


@dataclass(frozen=True, kw_only=True)
class Load:
    """Bytes in the busier direction of the busiest NIC of each kind."""

    host: float
    """NIC of a host with workers, and of the servers on it."""
    server: float = 0.0
    """NIC of a server machine."""

    def seconds(self, host_rate: float, server_rate: float) -> float:
        """Return the time until the last byte has passed. The arguments are rates of NICs, in bytes
        per second and direction."""
        return max(self.host / host_rate, self.server / server_rate)


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The servers of a job. All server processes get the same number of bytes."""

    hosts: int
    """Number of hosts with workers. All of them push at the same time."""
    extra: int
    """Number of server machines (without workers)."""
    local: int = 0
    """Server processes on each host with workers."""
    per_machine: int = 1
    """Server processes on each server machine."""

    def __post_init__(self) -> None:
        counts = (self.hosts - 1, self.extra, self.local, self.per_machine - 1)
        if min(counts) < 0 or not self.count:
            raise ValueError(f"there must be a host and a server at least: {self}")

    @property
    def count(self) -> int:
        """Return the number of server processes."""
        return self.extra * self.per_machine + self.local * self.hosts

    def shares(self) -> Shares:
        """Return the shares of a machine and of a host, for all processes on it."""
        return Shares(extra=self.per_machine / self.count, beside=self.local / self.count)


def best_servers(hosts: int, extra: int, within: float = 1.03) -> Servers:
    """Return how many server processes to start on each machine, so that every NIC is busy.

    Each process gets the same number of bytes, so the numbers of processes approximate
    :func:`best_shares`. The result has the fewest processes whose time is at most `within` times
    the best: for example 3 on each of 2 machines and 1 on each of 4 hosts.
    """
    best = both_kinds(hosts, extra, 1.0, 1.0) if extra else ring(hosts, 1.0, 1.0)
    choices = [
        Servers(hosts=hosts, extra=extra, local=local, per_machine=per_machine)
        for per_machine in range(1, 17 if extra else 2)
        for local in range(0 if extra else 1, 9)
    ]
    good = [
        servers
        for servers in choices
        if push_pull(servers, 1.0, 1.0).seconds(1.0, 1.0) <= within * best + 1e-9
    ]
    return min(
        good or choices,
        key=lambda servers: (
            servers.count if good else push_pull(servers, 1.0, 1.0).seconds(1.0, 1.0)
        ),
    )


def push_pull(servers: Servers, pushed: float, pulled: float) -> Load:
    """Return the load of a push-pull, for the bytes that the ranks of a host push and pull in
    total.

    A server with the fraction x of the tensor receives x * pushed from every host and sends x *
    pulled to each. Traffic between a worker and a server on the same host does not pass its NIC.
    """
    shares, others = servers.shares(), servers.hosts - 1
    own = shares.beside
    out = pushed * (1 - own) + pulled * own * others
    into = pulled * (1 - own) + pushed * own * others
    extra = servers.hosts * shares.extra * max(pushed, pulled) if servers.extra else 0.0
    return Load(host=max(out, into), server=extra)


def scatter_to_owners(hosts: int, pushed: float) -> Load:
    """Return the load of a reduce-scatter whose shards are summed on their owners' hosts. The ranks
    of a host push all shards but their own to other hosts; sums come from servers on the same
    host."""
    return Load(host=(hosts - 1) / hosts * pushed)


# ------------------------------------------------------------------------- cores and NICs

TCP_GBPS = 100.0
"""The fastest link, in Gbit/s, for which TCP was measured: at that rate a server spends 12 cores on
it. Use RDMA for faster links, where the NIC moves the bytes."""
TCP_CORE_RATE = 20e9 / 8
"""Bytes per second that a core sends or receives over TCP."""
ADD_CORE_RATE = 6e9
"""Bytes of pushes per second that a core of a server adds."""


@dataclass(frozen=True, kw_only=True)
class CoreSeconds:
    """CPU time of a push-pull, in core-seconds, on one machine of each kind."""

    host: float
    """A host with workers, and the servers on it."""
    server: float = 0.0
    """A server machine."""


def core_seconds(
    servers: Servers,
    pushed: float,
    pulled: float,
    *,
    core_rate: float = TCP_CORE_RATE,
    add_rate: float = ADD_CORE_RATE,
) -> CoreSeconds:
    """Return the CPU time of a push-pull. `pushed` and `pulled`: bytes of all ranks of a host.

    Workers send pushes and receive pulls. A server with the fraction x of the tensor receives and
    adds x * pushed from every host, and sends x * pulled to each. Traffic inside a host costs the
    same CPU time.

    Args:
        core_rate: bytes per second that a core sends or receives; infinite with RDMA.
        add_rate: bytes per second that a core adds.
    """
    shares = servers.shares()
    moved = (pushed + pulled) / core_rate
    serving = servers.hosts * (moved + pushed / add_rate)
    return CoreSeconds(host=moved + shares.beside * serving, server=shares.extra * serving)


def reduce_scatters(groups: Iterable[Sequence[int]], size: float) -> Load:
    """Return the load of reduce-scatters (or all-gathers) of torch.distributed that run at the same
    time.

    A ring of m members visits the members of a host one after the other, so (m-1)/m of the tensor
    leaves each host; nothing if all are on the same host.

    Args:
        groups: the host of every member, for each ring.
        size: bytes of the tensor on one member.
    """
    return _leaving(groups, size, lambda members: (len(members) - 1) / len(members))


def all_reduces(groups: Iterable[Sequence[int]], size: float) -> Load:
    """Return the load of all-reduces of torch.distributed that run at the same time. The arguments
    are those of `reduce_scatters`.

    2(h-1)/h of the tensor leaves each of h hosts. This is NCCL's optimum, with trees or with rings
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
        raise ValueError(
            f"{size} bytes at {rate} bytes/s: the size must not be negative, and the rate must be "
            "positive and finite"
        )
