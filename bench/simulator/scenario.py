"""What is simulated: workers, servers, links and the settings of the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

_HEADERS = 52  # bytes of a packet: IPv4, TCP, and TCP's time stamps
_PAGE = 4096
_PARTITIONS_PER_SERVER = 64
_PARTITION_S = 2e-6
_SMALLEST_PARTITION = range(32_768, 131_072 + 1)
_SMALLEST_S = 2.5e-3
LARGEST_PARTITION = 4_096_000
_FRAME = 14  # bytes: what a shaper counts in addition to the packet


def payload_fraction(mtu: int) -> float:
    """Part of a link's rate that carries payload: (mtu - 52) / (mtu + 14), TCP over IPv4."""
    if mtu <= _HEADERS:
        raise ValueError(f"an MTU of {mtu} bytes leaves no room for payload")
    return (mtu - _HEADERS) / (mtu + _FRAME)


def engine_partition(
    size: int,
    servers: int,
    smallest: int = 0,
    largest: int = LARGEST_PARTITION,
    *,
    link: float = 0.0,
) -> int:
    """Bytes of the partitions into which the engine cuts a tensor: 64 for each server, whole pages,
    within BYTEPS_MIN_PARTITION_BYTES and BYTEPS_PARTITION_BYTES (byteps/base/protocol.h).

    ``link``: bytes per second of a worker's link, where TCP carries the values; on a fast one they
    are longer, on a slow one the smallest is shorter, unless it is given.
    """
    if servers < 1:
        raise ValueError("there must be one server at least")
    if not smallest:
        shortest, longest = _SMALLEST_PARTITION[0], _SMALLEST_PARTITION[-1]
        smallest = max(shortest, min(longest, int(link * _SMALLEST_S))) if link else longest
    least, most = _whole_pages(smallest), _whole_pages(largest)
    worth = int(math.sqrt(size / servers * link * _PARTITION_S))
    wanted = _whole_pages(max(size // (_PARTITIONS_PER_SERVER * servers), worth))
    return min(max(wanted, min(least, most)), most)


MOST_BY_RATE = 16 << 20
COVERED_S = 5e-3


def engine_window(partition: int, servers: int, rate: float) -> int:
    """Bytes that a worker may have in flight for each server (BYTEPS_SERVER_WINDOW_BYTES=0): two
    partitions, so that one follows the other without a pause, and where those are small, what the
    worker's link of ``rate`` bytes per second carries in 5 ms, over all servers, 16 MiB at most
    (byteps/engine/requests.h)."""
    return max(2 * partition, int(min(MOST_BY_RATE, COVERED_S * rate)) // servers)


def _whole_pages(count: int) -> int:
    return -(-count // _PAGE) * _PAGE


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Workers that are alike, each on a host of its own: they do the same at the same time."""

    count: int
    rate: float
    """Bytes of payload a second, each way, of a worker's link."""
    start: float = 0.0
    """When they begin, in seconds: above 0 for stragglers."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One push-pull, or one ring all-reduce, of one tensor over all workers."""

    size: int
    """Bytes of the tensor."""
    workers: tuple[Workers, ...]
    servers: int
    server_rate: float
    """Bytes of payload a second, each way, of a server's link; colocated servers use the
    worker's."""
    colocated: bool = False
    """Server i runs on the host of worker i mod n, and shares its link."""
    core_rate: float = math.inf
    """Bytes a second that the switch carries in all: below the sum of the links, it is
    oversubscribed."""
    partition: int
    """Bytes of the partitions; the last may have fewer."""
    credit: int = 0
    """Partitions that a worker may have in the transport, for all servers together; 0: no limit.
    The engine has a window for each server instead."""
    socket_buffer: int = 3 << 20
    """Bytes that the kernel takes from the engine ahead of the link, for each connection: a
    partition gives its credit back when all but these are sent. About what is left for payload of
    the 4 MiB to which Linux lets a socket grow, unless told otherwise (net.ipv4.tcp_wmem)."""
    window: int = 0
    """Bytes that a worker may have in the transport for each server, one partition at least; 0: no
    limit. A server whose window is full keeps no other from its turn."""
    credit_delay: float = 0.0
    """Seconds from when a partition has left until its credit, or its part of the window, returns:
    the round trip after which an RDMA device reports a write."""
    slow_servers: int = 0
    """So many of the servers, the first ones, have links of ``slow_server_rate``."""
    slow_server_rate: float = math.inf
    """Bytes of payload a second, each way."""
    urgent_size: int = 0
    """Bytes of a second tensor whose partitions go before all others; 0: there is none."""
    urgent_start: float = 0.0
    """When all workers have it, in seconds."""
    placement: int = 0
    """Partition p goes to server (placement + p) mod servers."""
    staggered: bool = False
    """What the engine does not do: each worker begins every round over the servers at another
    one."""
    add_rate: float = math.inf
    """Bytes of pushes that a thread of a server adds in a second."""
    engine_threads: int = 4
    """BYTEPS_SERVER_ENGINE_THREAD: partitions are dealt to them round robin."""
    latency: float = 0.0
    """Seconds from the end of a message on the link to when the other side acts on it."""

    def __post_init__(self) -> None:
        if not self.workers or any(group.count < 1 for group in self.workers):
            raise ValueError("there must be one worker at least, in every group")
        if self.servers < 1 or self.engine_threads < 1:
            raise ValueError("there must be one server at least, with one thread at least")
        if self.size < 1 or self.partition < 1:
            raise ValueError("the tensor and its partitions must have one byte at least")
        waits = [self.credit, self.window, self.credit_delay, self.socket_buffer, self.latency]
        starts = [self.urgent_size, self.urgent_start, *(w.start for w in self.workers)]
        if min(*waits, *starts) < 0:
            raise ValueError(
                "credit, window, buffer, latency, sizes and starting times may not be negative"
            )
        rates = [self.server_rate, self.core_rate, self.add_rate, self.slow_server_rate]
        if not all(rate > 0 for rate in [*rates, *(w.rate for w in self.workers)]):
            raise ValueError("rates must be above 0")
        if not 0 <= self.slow_servers <= self.servers:
            raise ValueError(f"{self.slow_servers} of {self.servers} servers cannot be slow")
        if self.slow_servers and self.colocated:
            raise ValueError("colocated servers have their workers' links: none can be slow")

    @property
    def count(self) -> int:
        """Workers."""
        return sum(group.count for group in self.workers)

    @property
    def partitions(self) -> int:
        return -(-self.size // self.partition)

    @property
    def urgent_partition(self) -> int:
        """Bytes of the partitions of the urgent tensor, which is cut as the engine cuts it."""
        return engine_partition(self.urgent_size, self.servers)

    @property
    def urgent_partitions(self) -> int:
        return -(-self.urgent_size // self.urgent_partition) if self.urgent_size else 0

    def partition_size(self, index: int) -> int:
        """Bytes: the last partition may be shorter. Those of the urgent tensor are numbered after
        those of the first."""
        if index >= self.partitions:
            sent = (index - self.partitions) * self.urgent_partition
            return min(self.urgent_partition, self.urgent_size - sent)
        return min(self.partition, self.size - index * self.partition)

    def server_rates(self) -> list[float]:
        """Bytes of payload a second of each server's link."""
        usual = self.servers - self.slow_servers
        return [self.slow_server_rate] * self.slow_servers + [self.server_rate] * usual

    def server_of(self, index: int) -> int:
        return (self.placement + index) % self.servers

    def one_by_one(self) -> Scenario:
        """The same with every worker a group of its own."""
        alone = [replace(group, count=1) for group in self.workers for _ in range(group.count)]
        return replace(self, workers=tuple(alone))


def uniform(workers: int, servers: int, size: int, rate: float) -> Scenario:
    """Links that are all alike, defaults for the rest."""
    return Scenario(
        size=size,
        workers=(Workers(count=workers, rate=rate),),
        servers=servers,
        server_rate=rate,
        partition=engine_partition(size, servers),
    )
