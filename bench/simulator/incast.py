"""Pushes through a switch whose ports have little memory, burst by burst, and rules for how much a
worker hands to the transport ahead of the link.

The fluid simulation (``simulation``) shares links perfectly and has no queues. Here every host
sends bursts, one in the time that a link takes for it (a slot), to its connections round robin,
and each port of the switch is a queue of so many bytes that lets one burst go in a slot. What does
not fit is lost, or held back, as ``Incast.lossless`` says. Only pushes are simulated: answers are
the same with the hosts' parts exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.kit.record import show_size
from bench.simulator.scenario import Scenario, engine_window
from bench.simulator.simulation import push_pull

ORDERS = ("same", "turned", "random")


@dataclass(frozen=True, kw_only=True)
class Incast:
    """Workers push one tensor to all servers at once."""

    workers: int
    servers: int
    size: int
    """Bytes of the tensor: each server gets its even part of each worker."""
    rate: float
    """Bytes a second of every link."""
    burst: int
    """Bytes that a host sends to one connection before it turns to the next: what the kernel hands
    the NIC at once (64 KiB), or the MTU of an RDMA NIC."""
    port_bytes: int
    """Memory of a port of the switch."""
    lossless: bool
    """Priority flow control: a host waits while the port that its next burst goes to is full, and
    so does all that it would send to others after it. Otherwise a burst that finds the port full is
    lost."""
    delay: float
    """Seconds from when a burst has passed the switch until its sender knows."""
    partition: int
    """Bytes that a credit, or a place in a window, stands for; whole bursts."""
    credit: int = 0
    """Partitions that a worker may have in flight in all; 0: no limit."""
    window: int = 0
    """Bytes that a worker may have in flight for each server, one burst at least; 0: no limit."""
    timeout: float = 0.2
    """Seconds after which the last burst of a connection is sent again if it was lost. One that
    others follow on its connection is sent again after ``delay``."""
    order: str = "same"
    """In which workers turn to the servers: the ``same`` for all, in step; ``turned``, each
    beginning with another server; ``random``, each in an order of its own."""

    def __post_init__(self) -> None:
        sizes = [self.workers, self.servers, self.size, self.burst, self.port_bytes, self.partition]
        if min(sizes) < 1 or self.rate <= 0:
            raise ValueError("hosts, sizes and rate must be above 0")
        if min(self.credit, self.window, self.delay, self.timeout) < 0:
            raise ValueError("credit, window, delay and timeout may not be negative")
        if self.order not in ORDERS:
            raise ValueError(f"order {self.order!r} is none of {', '.join(ORDERS)}")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the pushes went."""

    seconds: float
    """Until the last burst has passed the switch."""
    lost: float
    """Bursts that were lost, over those that had to be sent."""
    held: float
    """Part of the hosts' time with something to send in which the switch held them back."""
    longest_queue: int
    """Bytes: of any port, at any time."""


def push(scenario: Incast, *, seed: int = 1) -> Outcome:
    """Simulate one push; ``seed`` decides who is first where several bursts come at once."""
    return _Switch(scenario, seed).run()


class _Switch:
    """The state. Bursts are counted, not bytes; w is a worker, s a server, of arrays [w, s]."""

    def __init__(self, scenario: Incast, seed: int) -> None:
        self._scenario = scenario
        self._random = np.random.default_rng(seed)
        n, k, burst = scenario.workers, scenario.servers, scenario.burst
        self._slot = burst / scenario.rate
        self._each = max(1, round(scenario.size / k / burst))
        self._per_partition = max(1, min(round(scenario.partition / burst), self._each))
        self._delay = max(1, math.ceil(scenario.delay / self._slot))
        self._timeout = max(self._delay, math.ceil(scenario.timeout / self._slot))
        self._depth = max(1, scenario.port_bytes // burst)
        limit = max(1, scenario.window // burst) if scenario.window else self._each
        self._limit = min(limit, self._each)
        if scenario.credit:
            self._limit = self._each

        self._unsent = np.full((n, k), self._each)  # not given to the transport
        self._given = np.zeros((n, k), dtype=int)  # given to the transport, and not sent
        self._under_way = np.zeros((n, k), dtype=int)  # sent, and not known to have passed
        self._passed = np.zeros((n, k), dtype=int)
        self._congestion = np.full((n, k), float(self._limit))  # what TCP lets be in flight
        self._not_before = np.zeros((n, k), dtype=int)
        self._order = self._servers_in_order()
        self._turn = np.zeros(n, dtype=int)  # the place in its order to which a worker comes next
        self._next_partition = np.zeros(n, dtype=int)
        self._credit = np.full(n, scenario.credit)
        self._queue = np.zeros((k, self._depth), dtype=int)
        self._head = np.zeros(k, dtype=int)
        self._length = np.zeros(k, dtype=int)
        self._known: list[np.ndarray] = [np.full(k, -1) for _ in range(self._delay + 1)]
        self._blocked = np.full(n, -1)  # the server of the burst for which a host is held

    def run(self) -> Outcome:
        scenario = self._scenario
        total = scenario.workers * scenario.servers * self._each
        passed = lost = held = busy = longest = slot = 0
        self._give_first()
        while passed < total:
            self._learn(slot)
            workers, servers = self._choose(slot)
            accepted = self._arrive(workers, servers)
            if scenario.lossless:
                self._blocked[:] = -1
                self._blocked[workers[~accepted]] = servers[~accepted]
                held += int((~accepted).sum())
                self._sent(workers[accepted], servers[accepted])
            else:
                self._sent(workers, servers)
                lost += int((~accepted).sum())
                self._lose(workers[~accepted], servers[~accepted], slot)
            busy += len(workers)
            longest = max(longest, int(self._length.max()))
            passed += self._drain(slot)
            slot = self._next_slot(slot, idle=not len(workers))
        return Outcome(
            seconds=slot * self._slot,
            lost=lost / total,
            held=held / busy,
            longest_queue=longest * scenario.burst,
        )

    def _servers_in_order(self) -> np.ndarray:
        """[w, place]: the server to which a worker turns at that place."""
        n, k = self._scenario.workers, self._scenario.servers
        places = np.tile(np.arange(k), (n, 1))
        if self._scenario.order == "turned":
            return (places + np.arange(n)[:, None]) % k
        return self._random.permuted(places, axis=1) if self._scenario.order == "random" else places

    def _next_slot(self, slot: int, *, idle: bool) -> int:
        """The next one, or where nothing is sent, queued or about to be known, the next timeout."""
        if idle and not self._length.any() and all((one < 0).all() for one in self._known):
            waiting = self._not_before[self._given > 0]
            if waiting.size and waiting.min() > slot:
                return int(waiting.min())
        return slot + 1

    # -- what the engine gives the transport

    def _give_first(self) -> None:
        if self._scenario.credit:
            self._spend(np.arange(self._scenario.workers))
        else:
            self._given[:] = self._limit
            self._unsent -= self._limit

    def _spend(self, workers: np.ndarray) -> None:
        """Give partitions, in the order that all workers have, for the credits there are."""
        per_server = -(-self._each // self._per_partition)
        k = self._scenario.servers
        while workers.size:
            ready = (self._credit[workers] > 0) & (self._next_partition[workers] < per_server * k)
            workers = workers[ready]
            place = self._next_partition[workers]
            server = self._order[workers, place % k]
            count = np.minimum(self._per_partition, self._unsent[workers, server])
            self._given[workers, server] += count
            self._unsent[workers, server] -= count
            self._credit[workers] -= 1
            self._next_partition[workers] += 1

    def _learn(self, slot: int) -> None:
        """Senders learn what passed the switch a while ago, and may send more."""
        workers = self._known[slot % len(self._known)]
        servers = np.flatnonzero(workers >= 0)
        workers = workers[servers]
        self._under_way[workers, servers] -= 1
        self._passed[workers, servers] += 1
        self._congestion[workers, servers] += 1 / self._congestion[workers, servers]
        if self._scenario.credit:
            count = self._passed[workers, servers]
            whole = (count % self._per_partition == 0) | (count == self._each)
            np.add.at(self._credit, workers[whole], 1)
            self._spend(np.unique(workers[whole]))
        else:
            more = np.minimum(self._unsent[workers, servers], 1)
            self._given[workers, servers] += more
            self._unsent[workers, servers] -= more

    # -- hosts

    def _may_send(self, workers: np.ndarray, servers: np.ndarray, slot: int) -> np.ndarray:
        return (
            (self._given[workers, servers] > 0)
            & (self._under_way[workers, servers] < self._congestion[workers, servers])
            & (self._not_before[workers, servers] <= slot)
        )

    def _choose(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """The workers that send now, and to whom: the next connection, round robin, that has
        something; one that was held sends what it was held with."""
        n, k = self._given.shape
        everyone = np.arange(n)
        held = self._blocked >= 0
        choice = np.where(held, self._blocked, self._order[everyone, self._turn])
        ready = held | self._may_send(everyone, choice, slot)
        # Those whose next connection is not ready look further.
        others = np.flatnonzero(~ready)
        if others.size:
            places = (self._turn[others, None] + np.arange(k)) % k
            around = self._order[others[:, None], places]
            may = self._may_send(others[:, None], around, slot)
            first = may.argmax(1)
            found = may[np.arange(len(others)), first]
            choice[others[found]] = around[found, first[found]]
            self._turn[others[found]] = places[found, first[found]]
            ready[others[found]] = True
        workers = np.flatnonzero(ready)
        taken = np.flatnonzero(ready & ~held)
        self._turn[taken] = (self._turn[taken] + 1) % k
        return workers, choice[workers]

    def _sent(self, workers: np.ndarray, servers: np.ndarray) -> None:
        self._given[workers, servers] -= 1
        self._under_way[workers, servers] += 1

    def _lose(self, workers: np.ndarray, servers: np.ndarray, slot: int) -> None:
        """A burst that others follow is missed after a round trip, the last one by a timeout."""
        followed = self._given[workers, servers] + self._under_way[workers, servers] > 1
        wait = np.where(followed, self._delay, self._timeout)
        self._given[workers, servers] += 1
        self._under_way[workers, servers] -= 1
        self._not_before[workers, servers] = slot + wait
        halved = np.where(followed, self._congestion[workers, servers] / 2, 1.0)
        self._congestion[workers, servers] = np.maximum(1.0, halved)

    # -- ports

    def _arrive(self, workers: np.ndarray, servers: np.ndarray) -> np.ndarray:
        """Put the bursts into the ports' queues; which of them found a place."""
        order = self._random.permutation(len(workers))
        order = order[np.argsort(servers[order], kind="stable")]
        sorted_servers = servers[order]
        begins = np.searchsorted(sorted_servers, sorted_servers)
        place = self._length[sorted_servers] + np.arange(len(order)) - begins
        fits = place < self._depth
        where = (self._head[sorted_servers] + place) % self._depth
        self._queue[sorted_servers[fits], where[fits]] = workers[order[fits]]
        np.add.at(self._length, sorted_servers[fits], 1)
        accepted = np.zeros(len(workers), dtype=bool)
        accepted[order[fits]] = True
        return accepted

    def _drain(self, slot: int) -> int:
        """Every port lets one burst go; how many went."""
        some = np.flatnonzero(self._length)
        left = np.full(len(self._length), -1)
        left[some] = self._queue[some, self._head[some]]
        self._head[some] = (self._head[some] + 1) % self._depth
        self._length[some] -= 1
        self._known[(slot + self._delay) % len(self._known)] = left
        return len(some)


_URGENT = 1 << 20  # bytes
_BUFFER = 3 << 20  # bytes that Linux lets a socket take, unless it is told otherwise
_LOW_WATER = 256 << 10  # bytes that it takes with TCP_NOTSENT_LOWAT
_CREDIT = 16  # partitions over all servers
RULES_HEAD = ("workers", "rule", "window", "over M/B", "urgent ms", "others over M/B")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What bounds what is handed to the transport, and when it is given back."""

    title: str
    credit: int = 0
    """Partitions over all servers; 0: no limit."""
    windows: float = 0.0
    """Of the recommended window, for each server; 0: no limit. 0.5 is one partition."""
    buffer: int = 0
    """Bytes of a connection that the kernel takes at once; 0: a write is reported when the device
    has made it, as RDMA does."""

    def applied(self, scenario: Scenario) -> Scenario:
        """The scenario under this rule."""
        window = 0
        if self.windows == 0.5:
            window = scenario.partition
        elif self.windows:
            own = engine_window(scenario.partition, scenario.servers, scenario.workers[0].rate)
            window = round(self.windows * own)
        return replace(scenario, credit=self.credit, window=window, socket_buffer=self.buffer)


RULES = (
    Rule(title="16 partitions in all, written", credit=_CREDIT),
    Rule(title="16 partitions in all, in a socket", credit=_CREDIT, buffer=_BUFFER),
    Rule(title="a partition a server, written", windows=0.5),
    Rule(title="a window a server, written", windows=1),
    Rule(title="a window a server, socket kept low", windows=1, buffer=_LOW_WATER),
    Rule(title="a window a server, in a socket", windows=1, buffer=_BUFFER),
    Rule(title="four windows a server, written", windows=4),
    Rule(title="no limit"),
)


def compare_rules(scenario: Scenario, link: float) -> Iterator[Sequence[str]]:
    """A row for each rule.

    ``urgent ms`` is the time until a tensor of 1 MiB that comes when a quarter of M/B has passed is
    summed, with priority over the rest. ``others over M/B`` is when the servers that are not slow
    have sent the last sum, if one server's link has a quarter of the rate.

    Args:
        scenario: a push-pull; its limits are replaced by the rules'.
        link: B of M/B, bytes per second.
    """
    limit = scenario.size / link
    for rule in RULES:
        one = rule.applied(scenario)
        urgent = push_pull(replace(one, urgent_size=_URGENT, urgent_start=limit / 4))
        others = "-"
        if scenario.servers > 1:
            slow = replace(one, slow_servers=1, slow_server_rate=scenario.server_rate / 4)
            others = f"{max(push_pull(slow).server_seconds[1:]) / limit:.3f}"
        yield (
            *(str(scenario.count), rule.title, show_size(one.window) if one.window else "-"),
            f"{push_pull(one).seconds / limit:.3f}",
            f"{urgent.urgent_seconds * 1e3:.2f}",
            others,
        )


INCAST_HEAD = ("workers", "switch", "order", "rule", "over M/B", "lost", "held", "longest queue")


def compare_incast(
    scenario: Scenario, *, burst: int, port_bytes: int, delay: float
) -> Iterator[Sequence[str]]:
    """A row for each switch, order of the servers, and rule of ``RULES`` that bounds differently.

    Args:
        scenario: as many servers as workers, on links that are alike.
        burst: bytes that a host sends to one connection at a time.
        port_bytes: memory of a port of the switch.
        delay: seconds until a sender knows of a burst's fate.
    """
    rate = scenario.server_rate
    limit = scenario.size / rate
    window = engine_window(scenario.partition, scenario.servers, rate)
    bounds = (
        ("16 partitions in all", {"credit": _CREDIT}),
        ("a window a server", {"window": window}),
    )
    for lossless in (True, False):
        for order in ("same", "random", "turned"):
            for title, bound in bounds:
                found = push(
                    Incast(
                        workers=scenario.count,
                        servers=scenario.servers,
                        size=scenario.size,
                        rate=rate,
                        burst=burst,
                        port_bytes=port_bytes,
                        lossless=lossless,
                        delay=delay,
                        partition=scenario.partition,
                        order=order,
                        **bound,
                    )
                )
                yield (
                    *(str(scenario.count), "pauses" if lossless else "drops", order, title),
                    *(f"{found.seconds / limit:.3f}", f"{found.lost:.3f}", f"{found.held:.3f}"),
                    show_size(found.longest_queue),
                )
