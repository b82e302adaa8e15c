"""A forecast in words: the table, and the one answer that all programs print."""

from __future__ import annotations

from byteps.cost_model import Servers
from byteps.forecast.machines import GBPS
from byteps.forecast.rows import WORTH_IT, Forecast, Row
from byteps.forecast.training import FEW_BITS
from byteps.routing import Network

NOTHING = "no gradient crosses hosts: nothing to gain"


def answer(found: Forecast) -> str:
    """What to change: one sentence for 16 bits or more, and one for few bits where they gain."""
    training = found.training
    if not training.crossing:
        return NOTHING
    least = training.least_bytes
    type_ = next((wire for wire, size in FEW_BITS.items() if size == least), "16 bits")
    sentences = [f"in {type_} or more: {_exact(found)}"]
    if found.few_bits:
        ways = " or ".join(f"{_change(found, row)} ({row.gain:.2f} x)" for row in found.few_bits)
        sentences.append(f"with fewer bits: {ways}; compare your loss curves first")
    if training.missing_overlaps:
        sentences.append(f"{' '.join(training.missing_overlaps)} would hide time in each of these")
    return "; ".join(sentences)


def _exact(found: Forecast) -> str:
    best, change = found.best, _change(found, found.best)
    if best.through_servers:
        gain = f"{best.gain:.2f} x as fast as plain Megatron at its best"
        return f"{change} ({gain})" if change else f"change nothing: what runs is {gain}"
    if change and best.flags:
        return f"{change} ({best.over_now:.2f} x, by plain Megatron's own flags; servers add less)"
    if change:
        return f"{change}: plain Megatron is as fast"
    return "change nothing: no servers are faster than plain Megatron"


def _change(found: Forecast, row: Row) -> str:
    add, drop = found.changes(row)
    parts = [f"add {' '.join(add)}"] if add else []
    parts += [f"drop {' '.join(drop)}"] if drop else []
    return " and ".join(parts)


def servers_text(servers: Servers) -> str:
    """Placement of the servers."""
    places = []
    if servers.extra:
        machines = "machine" if servers.extra == 1 else "machines"
        places.append(f"{servers.per_machine} on each of {servers.extra} {machines} of their own")
    if servers.local:
        places.append(f"{servers.local} on each of {servers.hosts} hosts")
    return f"servers: {', '.join(places)}"


def rates_text(network: Network) -> str:
    """The rates of the links, or how they were measured."""
    if not network.host_rate:
        return "link rates not known (BYTEPS_LINK_GBPS): bytes are compared"
    if network.collective_rate:
        return (
            f"measured with {network.measured_bytes / 1e6:.1f} MB: over a host's NIC "
            f"{network.host_rate / GBPS:.3g} Gbit/s through servers, "
            f"{network.collective_rate / GBPS:.3g} by the collective"
        )
    text = f"{network.host_rate / GBPS:g} Gbit/s per host"
    if network.servers.extra:
        text += f", {(network.server_rate or network.host_rate) / GBPS:g} Gbit/s per server"
    return text


def break_even(found: Forecast, micro_batch_s: float | None = None) -> str:
    """Computing time of a step up to which servers are worth it; empty: they are not at all.

    Args:
        micro_batch_s: for which a micro-batch computes; None: not known.
    """
    rows = (found.best, *found.few_bits)
    row = next((row for row in rows if row.through_servers), None)
    if row is None or row.gain < WORTH_IT or not found.network.host_rate:
        return ""
    plain, most = found.plain.seconds, found.plain.seconds - WORTH_IT * row.seconds
    return (
        "Gradients travel once a step, however many micro-batches it accumulates: "
        f"{' '.join(row.flags)} saves {plain - row.seconds:.3g} s of it. If nothing overlaps, the "
        f"whole step is {WORTH_IT} x as fast or more where it computes for at most "
        f"{most / (WORTH_IT - 1):.3g} s{_batches(most / (WORTH_IT - 1), micro_batch_s)}."
    )


def _batches(seconds: float, micro_batch_s: float | None) -> str:
    if micro_batch_s is None:
        return ""
    return f": {int(seconds / micro_batch_s)} micro-batches of {1e3 * micro_batch_s:g} ms"


def size_text(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def table(found: Forecast) -> str:
    """All rows: bytes over the NICs, time, and gain."""
    if not found.training.crossing:
        return NOTHING
    timed = bool(found.network.host_rate)
    rows = [
        (
            *("arguments", "through servers", "gradients", "parameters", "server"),
            *("ms" if timed else "-", "over plain", "over now", ""),
        )
    ]
    for row in found.rows:
        if row.refused:
            rows.append((row.name, f"refused: {row.refused}", "", "", "", "", "", "", ""))
            continue
        rows.append(
            (
                row.name,
                " and ".join(row.through_servers) or "nothing",
                size_text(row.gradients),
                size_text(row.parameters) if row.parameters else "-",
                size_text(row.server) if row.server else "-",
                f"{row.seconds * 1e3:.1f}" if timed else "-",
                f"{row.gain:.2f}",
                f"{row.over_now:.2f}",
                note(found, row),
            )
        )
    # A reason takes the width that it needs, and makes no column wider.
    shown = [row for row in rows if row[2]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def note(found: Forecast, row: Row) -> str:
    """Remark on a row's gain."""
    if row.compared:
        return f"for comparison: not in Megatron; loss {row.loss}"
    if row.plain:
        return "plain Megatron at its best" if row == found.plain else "plain Megatron"
    if not row.through_servers:
        return "gain of plain flags" if row.over_now > 1.005 else "left to NCCL"
    return f"{'few bits; ' * row.loses}loss {row.loss}" if row.loss else ""
