"""Predicts how long a push-pull takes, event by event, and a ring all-reduce on the same links.

Messages are fluids: all that are in flight share the links max-min fairly, and rates change when a
message ends or begins. docs/design/cost-model.md says what is modelled of the engine and of a ring,
and what is left out. Workers that are alike are simulated as one, so that a thousand of them cost
what one does.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.simulator.scenario import Scenario

_SAME = 1e-9  # relative: links that fill up together, but for rounding


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One link on the way of every flow."""

    link: np.ndarray
    """Index of the link for each flow (int)."""
    weight: np.ndarray
    """How much of the link a rate of 1 of that flow takes (float): above 1 where a flow stands for
    several equal ones that meet in this link."""


def max_min(capacity: np.ndarray, hops: Sequence[Hop], active: np.ndarray) -> np.ndarray:
    """The rate of every flow, in the unit of ``capacity``; 0 where not ``active``.

    Progressive filling: raise all rates together until a link is full, keep the flows through it
    at that rate, go on with the others. A flow through no limited link gets ``inf``.
    """
    rates = np.zeros(len(active))
    left = capacity.astype(float)
    growing = np.flatnonzero(active)
    while growing.size:
        load = np.zeros(len(capacity))
        for hop in hops:
            load += np.bincount(hop.link[growing], hop.weight[growing], len(capacity))
        level = np.full(len(capacity), np.inf)
        np.divide(left, load, out=level, where=load > 0)
        lowest = level.min()
        if np.isinf(lowest):
            rates[growing] = np.inf
            break
        full = level <= lowest * (1 + _SAME)
        stopped = np.zeros(growing.size, dtype=bool)
        for hop in hops:
            stopped |= full[hop.link[growing]]
        kept = growing[stopped]
        rates[kept] = lowest
        for hop in hops:
            left -= lowest * np.bincount(hop.link[kept], hop.weight[kept], len(capacity))
        np.maximum(left, 0.0, out=left)
        growing = growing[~stopped]
    return rates


_REST = 1e-3  # bytes: what rounding leaves of a message that has ended
_AT_ONCE = 1e-12  # seconds: events closer than this are one


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How a simulated push-pull went."""

    seconds: float
    """From time 0 until the last worker has all sums."""
    worker_seconds: tuple[float, ...]
    """When each group of workers had them."""
    worker_sent: tuple[float, ...]
    """Bytes that one worker of each group sent over its link."""
    worker_received: tuple[float, ...]
    server_seconds: tuple[float, ...]
    """When the last worker had the last sum of each server; 0 where a server sums nothing."""
    urgent_seconds: float
    """From the start of the urgent tensor until the last worker has its sums; 0 without one."""
    server_sent: tuple[float, ...]
    """Bytes that each server sent to other hosts."""
    server_received: tuple[float, ...]


def push_pull(scenario: Scenario) -> Prediction:
    """Simulate one push-pull; see the module and ``Scenario``."""
    if scenario.colocated or scenario.staggered:
        scenario = scenario.one_by_one()
    return _PushPull(scenario).run()


def ring(scenario: Scenario) -> float:
    """Seconds of a ring all-reduce over the workers, in their order; servers are not used.

    2(n-1) steps: each worker sends one n-th of the tensor to the next one, as soon as it has sent
    the one before and received the one that this step passes on. Every flow keeps the rate it has
    while all are in flight; additions cost nothing.
    """
    alone = scenario.one_by_one().workers
    n = len(alone)
    if n == 1:
        return alone[0].start
    links = np.array([worker.rate for worker in alone])
    every, one = np.arange(n), np.ones(n)
    hops = [
        Hop(link=every, weight=one),
        Hop(link=n + (every + 1) % n, weight=one),
        Hop(link=np.full(n, 2 * n), weight=one),
    ]
    capacity = np.concatenate([links, links, [scenario.core_rate]])
    step = scenario.size / n / max_min(capacity, hops, np.ones(n, dtype=bool))
    sent = np.array([worker.start for worker in alone])
    received = sent.copy()
    for _ in range(2 * (n - 1)):
        sent = np.maximum(sent, received) + step
        received = np.roll(sent, 1) + scenario.latency
    return float(max(sent.max(), received.max()))


class _Agenda:
    """What happens at known times: by time, then in the order in which it was added."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, tuple[str, int, int]]] = []
        self._added = 0

    def add(self, time: float, event: tuple[str, int, int]) -> None:
        self._added += 1
        heapq.heappush(self._events, (time, self._added, event))

    def next_time(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def pop(self) -> tuple[str, int, int]:
        return heapq.heappop(self._events)[2]


class _PushPull:
    """The state of a simulation.

    A flow is a connection in one direction: flow g*k + s carries the pushes of a worker of group g
    to server s, flow g*k + s + G*k the answers. It sends one message after the other.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._groups = len(scenario.workers)
        self._pairs = self._groups * scenario.servers
        self._capacity, self._hops = _links(scenario)
        flows = 2 * self._pairs
        self._queues: list[deque[int]] = [deque() for _ in range(flows)]
        self._left = np.zeros(flows)  # bytes of the message that a flow sends
        self._active = np.zeros(flows, dtype=bool)
        # None: the active flows have changed since.
        self._rates: np.ndarray | None = np.zeros(flows)
        self._moved = np.zeros(flows)
        # Of each worker's connection: bytes handed to it, the ends of the messages that hold a
        # credit, and how many bytes are sent when the first of those gives it back.
        self._handed = np.zeros(self._pairs)
        self._holding: list[deque[tuple[float, int]]] = [deque() for _ in range(self._pairs)]
        self._returns = np.full(flows, np.inf)
        self._outstanding = [0] * self._pairs  # bytes that take part in the window

        self._now = 0.0
        self._agenda = _Agenda()
        # What waits for the transport: of each worker's connection, the partitions with their
        # places in the worker's order, and of each worker, the first of those whose windows are
        # open. An entry that is no longer the first of its connection is ignored.
        self._waiting: list[deque[tuple[int, int]]] = [deque() for _ in range(self._pairs)]
        self._ready: list[list[tuple[int, int]]] = [[] for _ in range(self._groups)]
        self._in_transport = [0] * self._groups
        every = scenario.partitions + scenario.urgent_partitions
        self._arrived = [0] * every
        self._engine_free = np.zeros((scenario.servers, scenario.engine_threads))
        self._missing = [every] * self._groups
        self._finished = [0.0] * self._groups
        self._server_finished = [0.0] * scenario.servers
        self._urgent_finished = 0.0

    def run(self) -> Prediction:
        for group, workers in enumerate(self._scenario.workers):
            self._at(workers.start, "start", group, 0)
            if self._scenario.urgent_partitions:
                late = max(workers.start, self._scenario.urgent_start)
                self._at(late, "urgent", group, 0)
        while any(self._missing):
            self._advance()
        k, pairs = self._scenario.servers, self._pairs
        pushed = self._moved[:pairs].reshape(self._groups, k)
        pulled = self._moved[pairs:].reshape(self._groups, k)
        counts = np.array([workers.count for workers in self._scenario.workers])
        return Prediction(
            seconds=max(self._finished),
            worker_seconds=tuple(self._finished),
            worker_sent=tuple(pushed.sum(1)),
            worker_received=tuple(pulled.sum(1)),
            server_seconds=tuple(self._server_finished),
            urgent_seconds=self._urgent_finished,
            server_sent=tuple(counts @ pulled),
            server_received=tuple(counts @ pushed),
        )

    def _advance(self) -> None:
        """Go to the next moment at which something ends, and handle all that does."""
        if self._rates is None:
            self._rates = max_min(self._capacity, self._hops, self._active)
        under_way = np.flatnonzero(self._active)
        span = np.inf
        if under_way.size:
            ahead = np.minimum(self._left, self._returns - self._moved)[under_way]
            span = max(0.0, float((ahead / self._rates[under_way]).min()))
        span = min(span, max(self._agenda.next_time() - self._now, 0.0))
        assert np.isfinite(span), "workers wait, and nothing is in flight"
        moved = self._rates[under_way] * span
        self._left[under_way] -= moved
        self._moved[under_way] += moved
        self._now += span
        for flow in under_way[self._returns[under_way] - self._moved[under_way] <= _REST]:
            self._return_credits(int(flow))
        for flow in under_way[self._left[under_way] <= _REST]:
            self._sent(int(flow))
        while self._agenda.next_time() <= self._now + _AT_ONCE:
            what, group, index = self._agenda.pop()
            getattr(self, f"_{what}")(group, index)

    def _at(self, time: float, what: str, group: int, index: int) -> None:
        self._agenda.add(time, (what, group, index))

    # -- messages

    def _enqueue(self, flow: int, index: int) -> None:
        self._queues[flow].append(index)
        if not self._active[flow]:
            self._active[flow], self._rates = True, None
            self._left[flow] = self._scenario.partition_size(index)

    def _sent(self, flow: int) -> None:
        """The message at the head of a flow has left."""
        queue = self._queues[flow]
        index = queue.popleft()
        if queue:
            # The rest that rounding left belongs to the message that ended.
            self._left[flow] = self._scenario.partition_size(queue[0])
        else:
            self._active[flow], self._rates = False, None
        group = flow % self._pairs // self._scenario.servers
        what = "push_arrived" if flow < self._pairs else "answered"
        self._at(self._now + self._scenario.latency, what, group, index)

    def _hold_credit(self, flow: int, size: int) -> None:
        self._handed[flow] += size
        self._holding[flow].append((self._handed[flow], size))
        self._in_transport[flow // self._scenario.servers] += 1
        self._outstanding[flow] += size
        self._return_credits(flow, start=False)

    def _return_credits(self, flow: int, *, start: bool = True) -> None:
        """Give back the credits of the messages that the kernel has taken; push on with them."""
        holding, scenario = self._holding[flow], self._scenario
        taken = self._moved[flow] + scenario.socket_buffer + _REST
        returned = False
        while holding and holding[0][0] <= taken:
            _, size = holding.popleft()
            if scenario.credit_delay:
                self._at(self._now + scenario.credit_delay, "credit", flow, size)
            else:
                self._give_back(flow, size)
                returned = True
        first = holding[0][0] - scenario.socket_buffer if holding else np.inf
        self._returns[flow] = first
        if start and returned:
            self._hand_over(flow // scenario.servers)

    def _credit(self, flow: int, size: int) -> None:
        self._give_back(flow, size)
        self._hand_over(flow // self._scenario.servers)

    def _give_back(self, flow: int, size: int) -> None:
        group, server = divmod(flow, self._scenario.servers)
        self._in_transport[group] -= 1
        was_open = self._is_open(flow)
        self._outstanding[flow] -= size
        if not was_open and self._is_open(flow):
            self._is_ready(group, server)

    def _is_local(self, group: int, server: int) -> bool:
        return self._scenario.colocated and server % self._groups == group

    # -- workers

    def _start(self, group: int, _: int) -> None:
        scenario = self._scenario
        for place, index in enumerate(_order(scenario, group)):
            server = scenario.server_of(index)
            self._waiting[group * scenario.servers + server].append((place, index))
        for server in range(scenario.servers):
            self._is_ready(group, server)
        self._hand_over(group)

    def _urgent(self, group: int, _: int) -> None:
        """The urgent tensor goes before all that the transport does not have yet."""
        scenario = self._scenario
        for index in reversed(range(scenario.urgent_partitions)):
            number = scenario.partitions + index
            flow = group * scenario.servers + scenario.server_of(number)
            self._waiting[flow].appendleft((index - scenario.urgent_partitions, number))
        for server in range(scenario.servers):
            self._is_ready(group, server)
        self._hand_over(group)

    def _is_open(self, flow: int) -> bool:
        """Whether the window of a connection admits the partition that is next."""
        waiting, window = self._waiting[flow], self._scenario.window
        if not waiting:
            return False
        outstanding = self._outstanding[flow]
        size = self._scenario.partition_size(waiting[0][1])
        return not window or not outstanding or outstanding + size <= window

    def _is_ready(self, group: int, server: int) -> None:
        """Let a connection take part in the worker's choice, if its window is open."""
        flow = group * self._scenario.servers + server
        if self._is_open(flow):
            heapq.heappush(self._ready[group], (self._waiting[flow][0][0], server))

    def _hand_over(self, group: int) -> None:
        """Hand partitions to the transport, as long as there are credits and open windows."""
        scenario, ready = self._scenario, self._ready[group]
        while ready and not 0 < scenario.credit <= self._in_transport[group]:
            place, server = heapq.heappop(ready)
            flow = group * scenario.servers + server
            waiting = self._waiting[flow]
            if not waiting or waiting[0][0] != place or not self._is_open(flow):
                continue  # handed over already, or an urgent one came before it
            _, index = waiting.popleft()
            if self._is_local(group, server):
                self._at(self._now + scenario.latency, "push_arrived", group, index)
            else:
                self._enqueue(flow, index)
                self._hold_credit(flow, scenario.partition_size(index))
            self._is_ready(group, server)

    def _answered(self, group: int, index: int) -> None:
        self._missing[group] -= 1
        server = self._scenario.server_of(index)
        self._server_finished[server] = self._now
        if index >= self._scenario.partitions:
            self._urgent_finished = self._now - self._scenario.urgent_start
        if not self._missing[group]:
            self._finished[group] = self._now

    # -- servers

    def _push_arrived(self, group: int, index: int) -> None:
        """One thread adds what belongs to a partition; the last push completes it."""
        scenario = self._scenario
        count = scenario.workers[group].count
        server = scenario.server_of(index)
        engine = (server, index // scenario.servers % scenario.engine_threads)
        work = count * scenario.partition_size(index) / scenario.add_rate
        self._engine_free[engine] = max(self._engine_free[engine], self._now) + work
        self._arrived[index] += count
        if self._arrived[index] == scenario.count:
            self._at(float(self._engine_free[engine]), "summed", server, index)

    def _summed(self, server: int, index: int) -> None:
        for group in range(self._groups):
            if self._is_local(group, server):
                self._at(self._now + self._scenario.latency, "answered", group, index)
            else:
                flow = self._pairs + group * self._scenario.servers + server
                self._enqueue(flow, index)


def _order(scenario: Scenario, group: int) -> list[int]:
    """The order in which a worker pushes the partitions."""
    order = list(range(scenario.partitions))
    if not scenario.staggered:
        return order
    k = scenario.servers
    rounds = [order[start : start + k] for start in range(0, len(order), k)]
    turns = [group % len(one) for one in rounds]
    return [i for one, turn in zip(rounds, turns, strict=True) for i in one[turn:] + one[:turn]]


def _links(scenario: Scenario) -> tuple[np.ndarray, list[Hop]]:
    """Capacities, and the links that each flow passes: the worker's, the server's, the switch.

    Links, in this order: workers up, workers down, servers up, servers down, the switch. That of a
    group stands for the link of each of its workers.
    """
    groups, k = len(scenario.workers), scenario.servers
    group = np.repeat(np.arange(groups), k)
    server = np.tile(np.arange(k), groups)
    up, down = group, groups + group
    server_up, server_down = 2 * groups + server, 2 * groups + k + server
    if scenario.colocated:
        server_up, server_down = server % groups, groups + server % groups
    many = np.array([workers.count for workers in scenario.workers], dtype=float)[group]
    switch = np.full(2 * len(group), 2 * groups + 2 * k)
    both, one = np.concatenate([many, many]), np.ones(2 * len(group))
    links = np.array([workers.rate for workers in scenario.workers])
    servers = np.array(2 * scenario.server_rates())
    return np.concatenate([links, links, servers, [scenario.core_rate]]), [
        Hop(link=np.concatenate([up, down]), weight=one),
        Hop(link=np.concatenate([server_down, server_up]), weight=both),
        Hop(link=switch, weight=both),
    ]
