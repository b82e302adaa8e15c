# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""The table of how gradients are summed, and why, which a job prints when training begins."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import bytepslib
from .advice import USE, Advice, Training, Way, kinds_that_cross

if TYPE_CHECKING:
    from byteps.torch.routes import Decision, Network, Sum

    from ..param_and_grad_buffer import _ParamAndGradBucket

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
