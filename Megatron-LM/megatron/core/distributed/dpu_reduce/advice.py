# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""What a job would gain, by this flag and by the next one, and the tables that say it in words.

Times are those of the links at their best, for gradients and then parameters, as
:mod:`byteps.cost_model` has them. What overlaps with the backward pass gains less than that.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from . import bytepslib

if TYPE_CHECKING:
    from byteps.cost_model import Load
    from byteps.torch.routes import Decision, Network, Sum

    from ..param_and_grad_buffer import _ParamAndGradBucket


ENOUGH = 1.03
"""A shorter change of arguments is advised if its time is within this factor of the best."""

USE, WIRE_FLAG = "--use-dpu-reduce", "--dpu-reduce-wire-dtype"
FEW_BITS_SHOWN = "int8"
"""Is compared in any job, and advised in none: it loses bits of gradients."""
INSTANCES, OPTIMIZER = "--num-distributed-optimizer-instances", "--dpu-optimizer"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The gradients of one kind, dense or expert."""

    name: str
    groups: Mapping[tuple[int, ...], float]
    """Data-parallel groups: the host of each member, in the order of the group, and how many such
    groups there are."""
    elements: float
    """On each rank."""
    left: float = 0.0
    """Those of them that ranks update where servers keep the optimizer: Muon's matrices."""

    @property
    def most_hosts(self) -> int:
        """That a group is spread over."""
        return max((len(bytepslib.routes.per_host(hosts)) for hosts in self.groups), default=1)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a job reduces its gradients, and where its optimizer is."""

    kinds: tuple[Kind, ...]
    gradient_bytes: int = 4
    """Of an element as it is reduced."""
    wire_bytes: float | None = None
    """Of an element on its way to servers; None: as it is reduced."""
    parameter_bytes: int = 2
    """Of a parameter as the distributed optimizer gathers it."""
    sharded: bool = False
    """By the distributed optimizer."""
    instances: int = 1
    """Of that optimizer."""
    updated: bool = False
    """Servers keep the optimizer."""
    used: bool = False
    """The job has `USE`."""
    by_layer: bool = False
    """With the optimizer on the servers: parameters that are left to ranks are gathered."""

    @property
    def flags(self) -> frozenset[str]:
        """Those of the arguments that are compared which the job has."""
        has = {USE: self.used, OPTIMIZER: self.updated}
        wire = [] if self.wire_bytes is None else [_wire_flag(self.wire_bytes)]
        return frozenset([*wire, *(flag for flag, given in has.items() if given)])

    @property
    def crosses_hosts(self) -> bool:
        return any(kind.most_hosts > 1 for kind in self.kinds)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to reduce the gradients of a step, and to get the parameters to every rank."""

    flags: tuple[str, ...]
    """Its arguments, of those that are compared; none: all is left to torch.distributed."""
    gradients: float
    """Bytes over a host's NICs in their busier direction. With the optimizer on the servers,
    parameters come down meanwhile, and are as many."""
    parameters: float
    """Bytes of the same NICs, for the parameters that are gathered next."""
    server: float
    """Bytes over the NIC of a server's machine."""
    through_servers: tuple[str, ...]
    """Kinds of gradients of which a bucket goes to servers."""
    seconds: float
    """In units of a byte's time where rates are not known."""
    gain: float = 1.0
    """The time of torch.distributed over this one."""
    refused: str = ""
    """Why the arguments do not go with those of the job."""
    loses: bool = False
    """Gradients lose more bits than in bf16: it is advised only where the job has it already."""

    @property
    def name(self) -> str:
        return " ".join(self.flags) or "torch.distributed"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What :func:`advise` found."""

    ways: tuple[Way, ...]
    """The first is torch.distributed, the second `USE` alone."""
    best: Way
    """Of those that are about the fastest, the one to which the job has the shortest change."""
    add: tuple[str, ...]
    """The arguments of `best` that the job does not have."""
    drop: tuple[str, ...]
    """Those that it has, and `best` has not."""


def advise(training: Training, network: Network, optimizer_refused: str = "") -> Advice:
    """Compare the ways in which a job can reduce its gradients.

    Args:
        training: as its arguments have it, but for the flags that are compared.
        network: its links and servers.
        optimizer_refused: why the servers cannot keep its optimizer; empty: they can.
    """
    plain = replace(training, updated=False, wire_bytes=None)
    ways = [_way(plain, network, (), bytepslib.routes.COLLECTIVE)]
    ways += _through_servers(plain, network, training.wire_bytes)
    if (hosts := _instances(training)) is not None:
        local = replace(plain, instances=hosts)
        ways += _through_servers(local, network, training.wire_bytes, f"{INSTANCES} {hosts}")
    kept = replace(plain, updated=True, sharded=False, instances=1, by_layer=plain.sharded)
    ways += [
        replace(way, refused=optimizer_refused)
        for way in _through_servers(kept, network, training.wire_bytes, OPTIMIZER)
    ]
    first = ways[0].seconds
    ways = [replace(way, gain=first / way.seconds if way.seconds else 1.0) for way in ways]
    possible = [way for way in ways if not way.refused and not way.loses]
    limit = ENOUGH * min(way.seconds for way in possible)
    near = [way for way in possible if way.seconds <= limit]
    # A flag that no way has, as the wire's type where gradients have 16 bits, changes nothing.
    has = training.flags & {flag for way in ways for flag in way.flags}
    best = min(near, key=lambda way: (len(has.symmetric_difference(way.flags)), way.seconds))
    return Advice(
        ways=tuple(ways),
        best=best,
        add=tuple(flag for flag in best.flags if flag not in has),
        drop=tuple(sorted(has.difference(best.flags))),
    )


def _through_servers(
    plain: Training, network: Network, has: float | None, *flags: str
) -> list[Way]:
    """As gradients are reduced, in bf16 where that is less, and in few bits.

    Where servers update by few bits, parameters come down as differences in 8 bits.
    """
    shown = {None, 2, wire_bytes(FEW_BITS_SHOWN), has}
    ways = []
    for nbytes in sorted(shown, key=lambda one: -(one or plain.gradient_bytes)):
        if nbytes is not None and nbytes >= plain.gradient_bytes:
            continue
        wire = () if nbytes is None else (_wire_flag(nbytes),)
        busier = nbytes
        if plain.updated and nbytes is not None and nbytes < 2:
            busier = max(nbytes, wire_bytes("int8") or 0)
        way = _way(replace(plain, wire_bytes=busier), network, (USE, *wire, *flags))
        ways.append(replace(way, loses=nbytes is not None and nbytes < 2 and nbytes != has))
    return ways


def wire_bytes(name: str | None) -> float | None:
    """Of an element that travels in the type that ``--dpu-reduce-wire-dtype`` names."""
    if name is None:
        return None
    wire = bytepslib.wire.NAMES[name]
    return wire.element_bytes / wire.values


def _wire_flag(nbytes: float) -> str:
    names = bytepslib.wire.NAMES
    return next(f"{WIRE_FLAG} {name}" for name in names if wire_bytes(name) == nbytes)


def _instances(training: Training) -> int | None:
    """As many optimizer instances as the hosts of a group, where each would be one host; None:
    that is how it is, or not possible."""
    if not training.sharded:
        return None
    wanted: set[int] = set()
    for kind in training.kinds:
        for hosts in kind.groups:
            counts = bytepslib.routes.per_host(hosts)
            if len(counts) == 1:
                # Instances cut it too.
                wanted |= {0} if kind.name == "dense" else set()
                continue
            each = len(hosts) // len(counts)
            runs = {hosts[first : first + each] for first in range(0, len(hosts), each)}
            if each == 1 or any(len(set(run)) > 1 for run in runs):
                return None
            if kind.name == "dense":
                wanted.add(len(counts))
    if len(wanted) != 1 or 0 in wanted:
        return None
    hosts_of_group = wanted.pop()
    divides = all(
        len(hosts) % hosts_of_group == 0 for kind in training.kinds for hosts in kind.groups
    )
    return hosts_of_group if divides and hosts_of_group != training.instances else None


def _way(training: Training, network: Network, flags: tuple[str, ...], asked: str = "auto") -> Way:
    collective: dict[int, float] = {}
    pushed: dict[int, float] = {}
    gathered: dict[int, float] = {}
    server, through = 0.0, []
    for kind in training.kinds:
        left = kind.left if training.updated else 0.0
        for (hosts, count), (elements, updated) in itertools.product(
            kind.groups.items(), ((kind.elements - left, training.updated), (left, False))
        ):
            if not elements:
                continue
            what = bytepslib.routes.Sum(
                hosts=hosts,
                gradient_bytes=round(elements * training.gradient_bytes),
                wire_bytes=round(elements * (training.wire_bytes or training.gradient_bytes)),
                sharded=training.sharded,
                instances=training.instances,
                updated=updated,
            )
            decision = bytepslib.routes.decide(what, network, asked)
            load, spread = decision.loads[decision.route], bytepslib.routes.per_host(hosts)
            if decision.route != bytepslib.routes.COLLECTIVE:
                through.append(kind.name)
            into = collective if decision.route == bytepslib.routes.COLLECTIVE else pushed
            parameters = 0.0
            if training.sharded or (training.by_layer and not updated):
                parameters = _gathered(hosts, training, elements)
            for host in spread:
                into[host] = into.get(host, 0.0) + count * load.host
                gathered[host] = gathered.get(host, 0.0) + count * parameters
            # `load` is of a group that all hosts push to at the same time.
            server += count * load.server * len(spread) / network.servers.hosts
    rings, pushes = _load(collective), _load(pushed, server)
    gathers = _load(gathered)
    return Way(
        flags=flags,
        gradients=rings.host + pushes.host,
        parameters=gathers.host,
        server=server,
        through_servers=tuple(dict.fromkeys(through)),
        seconds=network.seconds(bytepslib.routes.COLLECTIVE, rings)
        + network.seconds(bytepslib.routes.FLAT, pushes)
        + network.seconds(bytepslib.routes.COLLECTIVE, gathers),
    )


def _gathered(hosts: tuple[int, ...], training: Training, elements: float) -> float:
    """Bytes of a group's parameters, so many, that leave one of its hosts."""
    from byteps import cost_model

    shards = len(hosts) // training.instances
    within = [hosts[first : first + shards] for first in range(0, len(hosts), shards)]
    return cost_model.reduce_scatters(within, elements * training.parameter_bytes).host


def _load(by_host: Mapping[int, float], server: float = 0.0) -> Load:
    from byteps import cost_model

    return cost_model.Load(host=max(by_host.values(), default=0.0), server=server)


def kinds_that_cross(training: Training) -> Sequence[Kind]:
    """Those of which a group is on several hosts."""
    return [kind for kind in training.kinds if kind.most_hosts > 1]


# In words.


_GBPS = 1e9 / 8


def describe(kind: str, sums: Sequence[tuple[Sum, Decision]], network: Network) -> str:
    """The table of a model chunk's sums: bytes over the NICs and time by each route, and which
    was chosen and why."""
    first, routes = sums[0][0], bytepslib.routes
    members, servers = sorted(routes.per_host(first.hosts).values()), network.servers
    each = str(members[0]) if members[0] == members[-1] else f"{members[0]} to {members[-1]}"
    keeps = "optimizer on the servers; " if first.updated else ""
    lines = [
        f"dpu_reduce: {kind} gradients over {len(first.hosts)} ranks, {each} on each of "
        f"{len(set(first.hosts))} hosts; {keeps}servers: "
        f"{servers.per_machine if servers.extra else 0} on each of {servers.extra} machines of "
        f"their own, {servers.local} on each of {servers.hosts} hosts; {_rates(network)}"
    ]
    rows = [("buckets", "MB", "backend", "MB per host", "MB per server", "ms", "chosen")]
    by_plan: dict[tuple[str, str], list[tuple[Sum, Decision]]] = {}
    for what, decision in sums:
        by_plan.setdefault((decision.route, decision.why), []).append((what, decision))
    for (chosen, why), alike in by_plan.items():
        head = (str(len(alike)), f"{sum(what.gradient_bytes for what, _ in alike) / 1e6:.1f}")
        for route in alike[0][1].loads:
            host = sum(decision.loads[route].host for _, decision in alike) / 1e6
            server = sum(decision.loads[route].server for _, decision in alike) / 1e6
            seconds = sum(decision.seconds[route] for _, decision in alike)
            rows.append(
                (
                    *head,
                    _collective_name(first) if route == routes.COLLECTIVE else f"BytePS {route}",
                    f"{host:.1f}",
                    "-" if route == routes.COLLECTIVE else f"{server:.1f}",
                    f"{seconds * 1e3:.1f}" if network.host_rate else "-",
                    f"yes: {why}" if route == chosen else "",
                )
            )
            head = ("", "")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join([*lines, *_kept(sums, members[0])])


def _kept(sums: Sequence[tuple[Sum, Decision]], ranks_per_host: int) -> list[str]:
    """A line on what ranks keep for servers that may be lost; none, if they keep nothing."""
    if float(os.environ.get("BYTEPS_REPLACE_SERVERS_S") or 0) <= 0 or sums[0][0].updated:
        return []
    host = sum(
        decision.loads[decision.route].host
        for _, decision in sums
        if decision.route != bytepslib.routes.COLLECTIVE
    )
    return [
        f"  each rank keeps {host / ranks_per_host / 1e6:.1f} MB of sums in host memory, until all "
        "ranks have them (BYTEPS_REPLACE_SERVERS_S)"
    ]


def _rates(network: Network) -> str:
    if not network.host_rate:
        return "link rates not known (BYTEPS_LINK_GBPS): bytes are compared"
    if network.collective_rate:
        return (
            f"measured with {network.measured_bytes / 1e6:.1f} MB: over a host's NIC "
            f"{network.host_rate / _GBPS:.3g} Gbit/s through servers, "
            f"{network.collective_rate / _GBPS:.3g} by the collective"
        )
    server = network.server_rate or network.host_rate
    return f"{network.host_rate / _GBPS:g} Gbit/s per host, {server / _GBPS:g} Gbit/s per server"


def _collective_name(what: Sum) -> str:
    if not what.sharded:
        return "all-reduce"
    return "reduce-scatter" if what.instances == 1 else "reduce-scatter, all-reduce of shards"


def types(buckets: Sequence[_ParamAndGradBucket]) -> str:
    """How many bytes a rank sends in which type, where gradients travel in few bits."""
    sent: dict[str, int] = {}
    kept = differences = 0
    bits: set[int] = set()
    for bucket in buckets:
        op = bucket.dpu_reduce_op
        if op.route == bytepslib.routes.COLLECTIVE:
            continue
        wire = str(op.wire)
        sent[wire] = sent.get(wire, 0) + op.wire.nbytes(bucket.grad_data.numel())
        if op.kept is not None:
            kept += op.kept.nbytes
            bits.add(8 * op.kept.itemsize)
        if op.updated and op.wire.is_block:
            differences += bytepslib.wire.int8().nbytes(bucket.grad_data.numel())
    told = ", ".join(f"{nbytes / 1e6:.2f} MB as {wire}" for wire, nbytes in sent.items())
    down = f"; {differences / 1e6:.2f} MB come back as int8 differences" if differences else ""
    return (
        f"dpu_reduce: gradients of a model chunk that go to servers: {told or 'none'}, "
        f"{kept / 1e6:.2f} MB in {max(bits, default=16)} bits (norms, biases, routers, small ones, "
        f"and what --dpu-reduce-keep-bf16 names){down}"
    )


def brief(training: Training, advice: Advice, network: Network) -> str:
    """Three lines: what crosses hosts, what each flag gains, and which change to make. One line
    where nothing crosses hosts."""
    crossing = kinds_that_cross(training)
    if not crossing:
        return "dpu_reduce: no gradient crosses hosts: nothing to gain"
    inside = [kind.name for kind in training.kinds if kind not in crossing]
    stay = f"; {' and '.join(inside)} gradients stay inside a host" if inside else ""
    spread = " and ".join(f"{kind.name} gradients {kind.most_hosts} hosts" for kind in crossing)
    rates = _rates(network)
    return "\n".join(
        (
            f"dpu_reduce: {spread} wide{stay}; over a host's NICs each way per step, by "
            f"torch.distributed: {_bytes(advice.ways[0])}; {rates}",
            "dpu_reduce: at best, compared with torch.distributed: "
            + ", ".join(_gain(way) for way in advice.ways[1:]),
            f"dpu_reduce: {change(advice)}",
        )
    )


def _bytes(way: Way) -> str:
    parameters = f" and {_gb(way.parameters)} of parameters" if way.parameters else ""
    return f"{_gb(way.gradients)} of gradients{parameters}"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def _gain(way: Way) -> str:
    flags = " ".join(way.flags[1:]) or USE
    return f"{flags} " + ("refused" if way.refused else f"{way.gain:.2f} x")


def change(advice: Advice) -> str:
    """The shortest change of arguments."""
    best = advice.best
    parts = [f"add {' '.join(advice.add)}"] if advice.add else []
    parts += [f"drop {' '.join(advice.drop)}"] if advice.drop else []
    if parts:
        text = " and ".join(parts)
        return f"shortest change for the best of these: {text} ({best.gain:.2f} x)"
    if not best.through_servers:
        return "servers gain nothing on these links: change nothing"
    return f"change nothing: what runs is the best of these ({best.gain:.2f} x)"


def compared(training: Training, advice: Advice, network: Network) -> str:
    """All ways in a table: bytes over the NICs, time, and gain."""
    if not kinds_that_cross(training):
        return "no gradient crosses hosts: nothing to gain"
    rows = [
        (
            *("arguments", "through servers", "gradients", "parameters", "server"),
            *("ms" if network.host_rate else "-", "gain"),
        )
    ]
    for way in advice.ways:
        if way.refused:
            rows.append((way.name, f"refused: {way.refused}", "", "", "", "", ""))
            continue
        rows.append(
            (
                way.name,
                " and ".join(way.through_servers) or "nothing",
                _gb(way.gradients),
                _gb(way.parameters) if way.parameters else "-",
                _gb(way.server) if way.server else "-",
                f"{way.seconds * 1e3:.1f}" if network.host_rate else "-",
                f"{way.gain:.2f}",
            )
        )
    # A reason takes the width that it needs, and makes no column wider.
    last = len(rows[0]) - 1
    widths = [max(len(row[column]) for row in rows if row[last]) for column in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def as_lines(text: str) -> str:
    """The table as it is, or where lines of the log are JSON as one of them."""
    if os.environ.get("BYTEPS_LOG_FORMAT") != "json":
        return text
    from byteps import logs

    return logs.render(logging.INFO, text)
