# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Messages at the start of a job: its forecast, and the backend of each bucket.

:mod:`byteps.forecast` computes the gain of the job's flags, and of flags that it could add.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import bytepslib

if TYPE_CHECKING:
    from byteps.forecast import Forecast, Row
    from byteps.torch.routes import Decision, Network, Sum

    from ..param_and_grad_buffer import _ParamAndGradBucket


def describe(kind: str, sums: Sequence[tuple[Sum, Decision]], network: Network) -> str:
    """Return the table of a model chunk's sums. A row has the bytes over the NICs and the time by
    each route, the chosen route, and the reason."""
    first, routes = sums[0][0], bytepslib.routes
    members = sorted(routes.per_host(first.hosts).values())
    each = str(members[0]) if members[0] == members[-1] else f"{members[0]} to {members[-1]}"
    keeps = "optimizer on the servers; " if first.updated else ""
    lines = [
        f"dpu_reduce: {kind} gradients over {len(first.hosts)} ranks, {each} on each of "
        f"{len(set(first.hosts))} hosts; {keeps}"
        f"{bytepslib.forecast.servers_text(network.servers)}; "
        f"{bytepslib.forecast.rates_text(network)}"
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
    """Return a line on the memory in which ranks keep gradients, because a server may be lost. The
    line is empty if ranks keep none."""
    replaced = bytepslib.figures.setting("BYTEPS_REPLACE_SERVERS_S", float) > 0
    if not replaced or sums[0][0].updated:
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


def _collective_name(what: Sum) -> str:
    if not what.sharded:
        return "all-reduce"
    return "reduce-scatter" if what.instances == 1 else "reduce-scatter, all-reduce of shards"


def types(buckets: Sequence[_ParamAndGradBucket]) -> str:
    """Return a text that says how many bytes a rank sends in each type. It is empty unless
    gradients travel in few bits."""
    sent: dict[str, int] = {}
    bf16_bytes = differences = 0
    bits: set[int] = set()
    for bucket in buckets:
        op = bucket.dpu_reduce_op
        if op.route == bytepslib.routes.COLLECTIVE:
            continue
        wire = str(op.wire)
        sent[wire] = sent.get(wire, 0) + op.wire.nbytes(bucket.grad_data.numel())
        if op.bf16_part is not None:
            bf16_bytes += op.bf16_part.nbytes
            bits.add(8 * op.bf16_part.itemsize)
        if op.updated and op.wire.is_block:
            differences += bytepslib.wire.int8().nbytes(bucket.grad_data.numel())
    by_type = ", ".join(f"{nbytes / 1e6:.2f} MB as {wire}" for wire, nbytes in sent.items())
    down = f"; {differences / 1e6:.2f} MB come back as int8 differences" if differences else ""
    return (
        f"dpu_reduce: gradients of a model chunk that go to servers: {by_type or 'none'}, "
        f"{bf16_bytes / 1e6:.2f} MB in {max(bits, default=16)} bits (norms, biases, routers, small "
        f"ones, and what --dpu-reduce-keep-bf16 names){down}"
    )


def missing_overlaps(config: Any) -> tuple[str, ...]:
    """Return Megatron's flags for overlapping communication that the job does not use. `config`:
    Megatron's arguments, or a DDP config."""
    flags = ["overlap_grad_reduce"]
    flags += ["overlap_param_gather"] if config.use_distributed_optimizer else []
    return tuple(f"--{flag.replace('_', '-')}" for flag in flags if not getattr(config, flag))


def brief(prediction: Forecast) -> str:
    """Return three lines: traffic between hosts, the gain of each flag, and the recommended change.
    If nothing crosses hosts, return a single line."""
    training, forecast = prediction.training, bytepslib.forecast
    crossing = training.crossing
    if not crossing:
        return f"dpu_reduce: {forecast.answer(prediction)}"
    inside = [kind.name for kind in training.kinds if kind not in crossing]
    stay = f"; {' and '.join(inside)} gradients stay inside a host" if inside else ""
    spread = " and ".join(f"{kind.name} gradients {kind.most_hosts} hosts" for kind in crossing)
    rows = [row for row in prediction.rows if not row.plain]
    return "\n".join(
        (
            f"dpu_reduce: {spread} wide{stay}; over a host's NICs each way per step, by plain "
            f"Megatron: {_bytes(prediction.rows[0])}; "
            f"{forecast.servers_text(prediction.network.servers)}; "
            f"{forecast.rates_text(prediction.network)}",
            "dpu_reduce: at best, over plain Megatron at its best "
            f"({' '.join(prediction.plain.flags) or 'as it is'}): "
            + ", ".join(
                _gain(prediction, row) for row in sorted(rows, key=lambda row: row.compared)
            ),
            f"dpu_reduce: {forecast.answer(prediction)}",
        )
    )


def _bytes(row: Row) -> str:
    text = bytepslib.forecast.size_text
    parameters = f" and {text(row.parameters)} of parameters" if row.parameters else ""
    return f"{text(row.gradients)} of gradients{parameters}"


def _gain(prediction: Forecast, row: Row) -> str:
    flags = prediction.name(row).removeprefix("--use-dpu-reduce ")
    loss = f" (loss {row.loss})" if row.loss else ""
    return f"{flags} " + ("refused" if row.refused else f"{row.gain:.2f} x{loss}")


def as_lines(text: str) -> str:
    """Return the table unchanged. If the log format is JSON, return it as a JSON log line."""
    if bytepslib.figures.setting("BYTEPS_LOG_FORMAT", str) != "json":
        return text
    from byteps import logs

    return logs.render(logging.INFO, text)
