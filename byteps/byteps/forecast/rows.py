"""Comparison of plain Megatron, Megatron's own best flags, and servers. Each row is a change of
arguments."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from byteps import cost_model, routing
from byteps.cost_model import Load
from byteps.forecast import training as arguments
from byteps.forecast.learning import measured_loss
from byteps.forecast.machines import BLOCK_VALUES_PER_CORE, Machines
from byteps.forecast.training import FEW_BITS, WIRE_BYTES, Kind, Training
from byteps.routing import Flow, Hosts, Network

ENOUGH = 1.03
"""Factor within which a row's time may exceed the best. The row with the shortest change of
arguments is then advised."""
WORTH_IT = 1.1
"""Least gain over plain Megatron at which servers are advised."""
FP8_BYTES = 130 / 128
"""Bytes per value in blocks of fp8 with a scale. Other projects send gradients in this form over
NCCL."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One set of arguments: bytes over the NICs, time, and gain."""

    flags: tuple[str, ...]
    """Arguments that are added to those of plain Megatron; empty: the job's own arguments."""
    plain: bool = False
    """Whether this is plain Megatron, without BytePS."""
    compared: bool = False
    """Whether the row is only shown, and never advised, because Megatron has no such path."""
    wire: str | None = None
    """Type in which values travel to servers; None: the type in which they are reduced."""
    optimizer: str = "ranks"
    """Place of the optimizer: "ranks", "servers", or FSDP2's "shards"."""
    gradients: float
    """Bytes of gradients over a host's NICs in the busier direction. With the optimizer on the
    servers, parameters are pulled at the same time, in the other direction."""
    parameters: float
    """Bytes of the parameters that are gathered afterwards, over the same NICs."""
    server: float
    """Bytes over the NIC of a spare machine."""
    flow: Flow
    """Bytes that a host exchanges with servers."""
    through_servers: tuple[str, ...]
    """Kinds of gradients ("dense", "expert") of which at least one bucket goes through servers."""
    push_seconds: float
    """Time of the push-pulls, in seconds."""
    limit: str = ""
    """Bottleneck of the push-pulls: "cores" or "memory" of a machine; empty: the links."""
    forward_seconds: float = 0.0
    """Time of the gather of parameters for the forward pass, in seconds."""
    seconds: float
    """Time of a step's communication in seconds, without overlap. If rates are unknown, bytes."""
    gain: float = 1.0
    """Time of the best plain row divided by this row's time."""
    over_now: float = 1.0
    """Time of plain Megatron with the job's present arguments divided by this row's time."""
    refused: str = ""
    """Reason why the arguments are incompatible with those of the job; empty: they are
    compatible."""
    loses: bool = False
    """Whether gradients travel in fewer bits than in the user's job, and in fewer than bf16 has."""

    def step_seconds(self, compute_s: float) -> float:
        """Return the time of a step with one micro-batch, which computes for `compute_s`.
        Megatron's overlaps hide gradients behind the backward pass, two thirds of `compute_s`, and
        parameters behind the forward pass. FSDP2 gathers parameters in both."""
        backward = self.seconds - self.forward_seconds
        exposed = max(0.0, backward - 2 * compute_s / 3)
        return compute_s + exposed + max(0.0, self.forward_seconds - compute_s / 3)

    @property
    def loss(self) -> str:
        """Measured difference between the loss of this row and that with bf16; empty: no bits are
        lost."""
        if not (self.compared or self.wire in FEW_BITS):
            return ""
        return measured_loss(self.wire, self.optimizer)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Result of :func:`forecast`."""

    training: Training
    network: Network
    rows: tuple[Row, ...]
    """All rows. The first row is plain Megatron with the job's arguments."""
    plain: Row
    """The fastest row of plain Megatron."""
    best: Row
    """The recommended row: the one with the shortest change of arguments, among rows that are about
    as fast as the fastest. Rows that lose more bits than the job and bf16 do are left out."""
    few_bits: tuple[Row, ...]
    """The best row with int8 and the best row with int4, if they gain more than `best`."""
    micro_batch_s: float | None = None
    """Computing time of a micro-batch, in seconds; None: unknown."""

    def typed(self, flags: Sequence[str]) -> tuple[str, ...]:
        """Return the words that a user types for these arguments."""
        on_hosts = self.training.preset or not self.network.servers.extra
        return self.training.program.typed(flags, on_hosts=on_hosts)

    def name(self, row: Row) -> str:
        """Return the name of a row: the words that a user types, or a description."""
        if row.compared:
            return "FP8 over NCCL"
        return " ".join(self.typed(row.flags)) or f"plain {self.training.program.name}, as it is"

    def step_gain(self, row: Row) -> float:
        """Return the gain of a whole step over the best plain row. If the computing time of a
        micro-batch is unknown, return the gain of the communication."""
        if self.micro_batch_s is None:
            return row.gain
        compute = self.micro_batch_s
        return self.plain.step_seconds(compute) / row.step_seconds(compute)

    def changes(self, row: Row) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the words that a user must add, and the words that a user must drop, to get a row.

        A plain row keeps ``--use-dpu-reduce``, because the flag leaves these buckets to NCCL
        anyway. A preset is dropped as a whole.
        """
        has = self._has
        drop = has.difference(row.flags)
        if self.training.preset and (row.optimizer != "servers" or not row.wire):
            has, drop = frozenset(), frozenset({arguments.OWN_HOSTS})
        elif self.training.preset:
            drop -= {f"{arguments.WIRE} int8"}
        elif row.plain:
            drop &= {arguments.OPTIMIZER}
        add = [flag for flag in row.flags if flag not in has]
        return self.typed(add), tuple(sorted(drop))

    def by_servers(self) -> list[Row]:
        """Return the best rows that use servers: one that loses no bits, one with int8, one with
        int4."""
        rows = [row for row in self.rows if row.through_servers and not row.refused]
        classes = [[row for row in rows if not row.loses]]
        classes += [[row for row in rows if row.loses and row.wire == wire] for wire in FEW_BITS]
        return [_shortest(self, of_class) for of_class in classes if of_class]

    def with_preset(self) -> list[Row]:
        """Return `by_servers`, and the other rows of the preset."""
        best = self.by_servers()
        preset = [row for row in self.rows if arguments.OWN_HOSTS in self.typed(row.flags)]
        return [*best, *(row for row in preset if row not in best and not row.refused)]

    @property
    def _has(self) -> frozenset[str]:
        # A flag that no row has changes nothing, such as bf16 on the wire for 16-bit gradients.
        return self.training.flags & {flag for row in self.rows for flag in row.flags}


def forecast(
    training: Training, where: Machines | Network, optimizer_refused: str = ""
) -> Forecast:
    """Compare the ways in which a job can reduce its gradients.

    Args:
        training: the job's present arguments.
        where: the machines; or the links and servers of a running job, whose cores are assumed to
            be enough.
        optimizer_refused: reason why servers cannot keep the job's optimizer; empty: they can.
    """
    candidates = _Rows(training, where)
    plain = candidates.plain()
    rows = [*plain, candidates.fp8(min(plain, key=_time).flags)]
    base = candidates.base
    rows += candidates.through_servers(base)
    if (hosts := arguments.instances_for_hosts(base)) is not None:
        local = replace(base, instances=hosts)
        rows += candidates.through_servers(local, f"{arguments.INSTANCES} {hosts}")
    if training.program is arguments.MEGATRON:
        of_servers = replace(base, updated=True, sharded=False, instances=1, by_layer=base.sharded)
        rows += [
            replace(row, refused=optimizer_refused)
            for row in candidates.through_servers(of_servers, arguments.OPTIMIZER)
        ]
    best_plain = min(plain, key=lambda row: (round(row.seconds / _time(plain[0]), 6), row.flags))
    rows = [
        replace(row, gain=_over(best_plain, row), over_now=_over(plain[0], row)) for row in rows
    ]
    slow = [
        row
        for row in rows[1:]
        if row.plain and row.over_now < ENOUGH and row.flags != best_plain.flags
    ]
    shown = tuple(row for row in rows if row not in slow)
    fastest = next(row for row in shown if row.plain and row.flags == best_plain.flags)
    micro_batch_s = where.micro_batch_s if isinstance(where, Machines) else None
    first = Forecast(
        training=training,
        network=candidates.network,
        rows=shown,
        plain=fastest,
        best=fastest,
        few_bits=(),
        micro_batch_s=micro_batch_s,
    )
    return _chosen(first)


def _time(row: Row) -> float:
    return row.seconds or 1.0


def _over(first: Row, row: Row) -> float:
    return first.seconds / row.seconds if row.seconds else 1.0


def _chosen(forecast: Forecast) -> Forecast:
    exact = [row for row in forecast.rows if not (row.refused or row.compared or row.loses)]
    best, gain = _shortest(forecast, exact), forecast.step_gain
    if gain(best) < WORTH_IT and best.through_servers and not forecast.training.used:
        best = _shortest(forecast, [row for row in exact if not row.through_servers])
    few = [row for row in forecast.by_servers() if row.loses and gain(row) >= WORTH_IT * gain(best)]
    return replace(forecast, best=best, few_bits=tuple(few))


def _shortest(forecast: Forecast, rows: Sequence[Row]) -> Row:
    """Return the row with the shortest change among those that are about as fast as the fastest."""
    limit = ENOUGH * min(row.seconds for row in rows)

    def change(row: Row) -> tuple[int, float]:
        return sum(map(len, forecast.changes(row))), row.seconds

    return min((row for row in rows if row.seconds <= limit), key=change)


class _Rows:
    """Makes the rows of a job on its machines."""

    def __init__(self, training: Training, where: Machines | Network) -> None:
        # `Hosts` caches its hash, because groups may have thousands of members.
        self._training = replace(
            training,
            kinds=tuple(
                replace(kind, groups={Hosts(hosts): count for hosts, count in kind.groups.items()})
                for kind in training.kinds
            ),
        )
        self._machines = where if isinstance(where, Machines) else None
        self.network = where.network if isinstance(where, Machines) else where

    @property
    def base(self) -> Training:
        """The job's training, without servers."""
        return replace(self._training, updated=False, wire=None)

    def plain(self) -> list[Row]:
        """Return the rows of plain Megatron: with the job's arguments, and with each combination of
        Megatron's flags that the job could add."""
        now = self.base
        variants: list[tuple[tuple[str, ...], Training]] = [((), now)]
        if now.can_shard and not now.sharded:
            variants.append(((arguments.SHARDED,), replace(now, sharded=True)))
        for flags, variant in tuple(variants):
            if (hosts := arguments.instances_for_hosts(variant)) is not None:
                more = (*flags, f"{arguments.INSTANCES} {hosts}")
                variants.append((more, replace(variant, instances=hosts)))
        if now.bf16 and now.gradient_bytes > 2:
            variants += [
                ((*flags, arguments.HALF), replace(variant, gradient_bytes=2))
                for flags, variant in variants
            ]
        self._plain = dict(variants)
        return [
            replace(self._row(variant, flags, routing.COLLECTIVE), plain=True)
            for flags, variant in variants
        ]

    def fp8(self, flags: tuple[str, ...]) -> Row:
        """Return the plain row of these flags with gradients in blocks of fp8, for comparison."""
        variant = replace(self._plain[flags], gradient_bytes=FP8_BYTES)
        return replace(self._row(variant, flags, routing.COLLECTIVE), compared=True)

    def through_servers(self, base: Training, *flags: str) -> list[Row]:
        """Return rows with the job's gradient dtype, with bf16 if that is smaller, and with few
        bits."""
        rows = []
        for wire in ("bf16", *FEW_BITS):
            if WIRE_BYTES[wire] < base.gradient_bytes:
                named = (arguments.USE, f"{arguments.WIRE} {wire}", *flags)
                row = self._row(replace(base, wire=wire), named)
                loses = WIRE_BYTES[wire] < self._training.least_bytes
                rows.append(replace(row, loses=loses))
        return [self._row(base, (arguments.USE, *flags)), *rows]

    def _row(
        self, training: Training, flags: tuple[str, ...], requested: str = routing.AUTO
    ) -> Row:
        network, collective, pushed = self.network, dict[int, float](), dict[int, float]()
        gathered, flows, copied = dict[int, float](), dict[int, Flow](), 0.0
        server, through = 0.0, list[str]()
        for kind, hosts, count, elements, updated in _pieces(training):
            what = _sum(training, hosts, elements, network, updated=updated)
            decision = routing.decide(what, network, requested)
            load, spread = decision.loads[decision.route], routing.per_host(hosts)
            into = collective
            if decision.route != routing.COLLECTIVE:
                into = pushed
                through.append(kind.name)
                flow = routing.flows_of(what)[decision.route]
                for host in spread:
                    before = flows.get(host, Flow(pushed=0.0, pulled=0.0))
                    flows[host] = Flow(
                        pushed=before.pushed + count * flow.pushed,
                        pulled=before.pulled + count * flow.pulled,
                    )
                copied += count * elements * self._copied(training) if updated else 0.0
            parameters = 0.0
            if training.sharded or (training.by_layer and not updated):
                parameters = _gathered(hosts, training.instances) * elements
                parameters *= _gathered_bytes(training)
            for host in spread:
                into[host] = into.get(host, 0.0) + count * load.host
                gathered[host] = gathered.get(host, 0.0) + count * parameters
            # `load.server` is for pushes of all hosts at once; here only the group's hosts push.
            server += count * load.server * len(spread) / network.servers.hosts
        share = copied / network.servers.count
        pushes = Load(
            host=_most(pushed) + share * network.servers.local,
            server=server + (share * network.servers.per_machine if network.servers.extra else 0),
        )
        flow = max(flows.values(), key=lambda flow: flow.pushed, default=Flow(pushed=0, pulled=0))
        push_seconds, limit = self._push_seconds(pushes, flow, share, training.wire)
        others = [Load(host=_most(by_host)) for by_host in (collective, gathered)]
        reduced, after = (network.seconds(routing.COLLECTIVE, load) for load in others)
        return Row(
            flags=flags,
            wire=training.wire,
            optimizer=_keeper(training),
            gradients=others[0].host + pushes.host,
            parameters=others[1].host,
            server=pushes.server,
            flow=flow,
            through_servers=tuple(dict.fromkeys(through)),
            push_seconds=push_seconds,
            limit=limit,
            forward_seconds=after / max(1, training.program.gathers),
            seconds=reduced + push_seconds + after,
        )

    def _copied(self, training: Training) -> float:
        """Return the bytes per value that a server sends to the server that keeps a copy of its
        state."""
        if self._machines is None or not self._machines.backup:
            return 0.0
        return 4.0 if training.wire in FEW_BITS else _wire_bytes(training)

    def _push_seconds(
        self, load: Load, flow: Flow, copied: float, wire: str | None
    ) -> tuple[float, str]:
        """Return the time of the push-pulls and its bottleneck; an empty name means the NICs."""
        seconds = self.network.seconds(routing.FLAT, load)
        if self._machines is None or not flow.pushed:
            return seconds, ""
        rate = add_rate_of(self._machines, wire)
        limits = self._machines.limits(self.network.servers, flow.pushed, flow.pulled, rate, copied)
        most = max(limits, key=lambda name: limits[name])
        return (limits[most], most) if limits[most] > seconds else (seconds, "")


def add_rate_of(machines: Machines, wire: str | None) -> float:
    """Return the bytes of pushes of this type that a core adds per second."""
    return BLOCK_VALUES_PER_CORE * FEW_BITS[wire] if wire in FEW_BITS else machines.add_rate


def _pieces(
    training: Training,
) -> list[tuple[Kind, tuple[int, ...], float, float, bool]]:
    """Return a tuple for each group: its kind, its hosts, the number of such groups, the number of
    elements, and whether servers update them."""
    pieces = []
    for kind in training.kinds:
        left = kind.left if training.updated else 0.0
        parts = ((kind.elements - left, training.updated), (left, False))
        for (hosts, count), (elements, updated) in itertools.product(kind.groups.items(), parts):
            if elements:
                pieces.append((kind, hosts, count, elements, updated))
    return pieces


def _sum(
    training: Training, hosts: tuple[int, ...], elements: float, network: Network, *, updated: bool
) -> routing.Sum:
    # Parameters are pulled as differences, always in 8 bits.
    differences = updated and training.wire in FEW_BITS
    return routing.Sum(
        hosts=hosts,
        gradient_bytes=round(elements * training.gradient_bytes),
        wire_bytes=round(elements * _wire_bytes(training)),
        pulled_bytes=round(elements * FEW_BITS["int8"]) if differences else None,
        sharded=training.sharded,
        instances=training.instances,
        updated=updated,
        placed=bool(training.program.gathers) and not network.servers.extra,
    )


def _keeper(training: Training) -> str:
    if training.program.gathers:
        return "shards"
    return "servers" if training.updated else "ranks"


def _gathered_bytes(training: Training) -> float:
    """Return the bytes per parameter of all gathers of a micro-batch."""
    if not training.program.gathers:
        return training.parameter_bytes
    each = FEW_BITS["int8"] if training.wire in FEW_BITS else training.parameter_bytes
    return training.program.gathers * each


def _wire_bytes(training: Training) -> float:
    return training.gradient_bytes if training.wire is None else WIRE_BYTES[training.wire]


@functools.lru_cache(maxsize=64)
def _gathered(hosts: tuple[int, ...], instances: int) -> float:
    """Return the fraction of a group's parameters that leaves a host when they are all-gathered."""
    shards = len(hosts) // instances
    within = [hosts[first : first + shards] for first in range(0, len(hosts), shards)]
    return cost_model.reduce_scatters(within, 1.0).host


def _most(by_host: dict[int, float]) -> float:
    return max(by_host.values(), default=0.0)
