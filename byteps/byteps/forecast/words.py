"""A forecast as text: the table, and the recommendation that all programs print."""

from __future__ import annotations

from byteps.cost_model import TCP_GBPS, Servers
from byteps.forecast.machines import GBPS, Machines
from byteps.forecast.rows import WORTH_IT, Forecast, Row
from byteps.forecast.training import FEW_BITS
from byteps.routing import Network

NOTHING = "no gradient crosses hosts: nothing to gain"


def answer(forecast: Forecast) -> str:
    """Return the recommended changes: a sentence for 16 bits or more, and a sentence for few bits
    if they gain."""
    training = forecast.training
    if not training.crossing:
        return NOTHING
    least = training.least_bytes
    type_ = next((wire for wire, size in FEW_BITS.items() if size == least), "16 bits")
    sentences = [f"in {type_} or more: {_exact(forecast)}"]
    if forecast.few_bits:
        ways = " or ".join(
            f"{change_text(forecast, row)} ({row.gain:.2f} x)" for row in forecast.few_bits
        )
        sentences.append(f"with fewer bits: {ways}; compare your loss curves first")
    if training.missing_overlaps:
        sentences.append(f"{' '.join(training.missing_overlaps)} would hide time in each of these")
    return "; ".join(sentences)


def _exact(forecast: Forecast) -> str:
    best, change = forecast.best, change_text(forecast, forecast.best)
    plain = f"plain {forecast.training.program.name}"
    if best.through_servers:
        gain = f"{best.gain:.2f} x as fast as {plain} at its best"
        return f"{change} ({gain})" if change else f"change nothing: what runs is {gain}"
    if change and best.flags:
        return f"{change} ({best.over_now:.2f} x, by {plain} alone; servers add less)"
    if change:
        return f"{change}: {plain} is as fast"
    exact = [row for row in forecast.by_servers() if not row.loses]
    if forecast.micro_batch_s is not None and any(row.gain >= WORTH_IT for row in exact):
        return "change nothing: what servers would save hides behind a micro-batch"
    return f"change nothing: servers are less than {WORTH_IT:g} x as fast as {plain}"


def change_text(forecast: Forecast, row: Row) -> str:
    """Describe what a user adds and drops to get a row; empty: nothing."""
    add, drop = forecast.changes(row)
    parts = [f"add {' '.join(add)}"] if add else []
    parts += [f"drop {' '.join(drop)}"] if drop else []
    return " and ".join(parts)


def servers_text(servers: Servers) -> str:
    """Describe the placement of the servers."""
    places = []
    if servers.extra:
        machines = "machine" if servers.extra == 1 else "machines"
        places.append(f"{servers.per_machine} on each of {servers.extra} {machines} of their own")
    if servers.local:
        places.append(f"{servers.local} on each of {servers.hosts} hosts")
    return f"servers: {', '.join(places)}"


def rates_text(network: Network) -> str:
    """Describe the rates of the links, and how they were measured."""
    if not network.host_rate:
        return "link rates not known (BYTEPS_LINK_GBPS): bytes are compared"
    if network.collective_rate and network.measured_bytes:
        return (
            f"measured with {network.measured_bytes / 1e6:.1f} MB: over a host's NIC "
            f"{network.host_rate / GBPS:.3g} Gbit/s through servers, "
            f"{network.collective_rate / GBPS:.3g} by the collective"
        )
    text = f"{network.host_rate / GBPS:g} Gbit/s per host"
    if network.servers.extra:
        text += f", {(network.server_rate or network.host_rate) / GBPS:g} Gbit/s per server"
    return text


def break_even(forecast: Forecast) -> str:
    """Describe up to which computing time per step servers gain enough. If they never do, describe
    what already hides the communication."""
    rows = (forecast.best, *forecast.few_bits)
    row = next((row for row in rows if row.through_servers), None)
    if row is None or row.gain < WORTH_IT or not forecast.network.host_rate:
        return _hidden(forecast)
    plain, most = forecast.plain.seconds, forecast.plain.seconds - WORTH_IT * row.seconds
    batches = ""
    if (each := forecast.micro_batch_s) is not None:
        batches = f": {int(most / (WORTH_IT - 1) / each)} micro-batches of {1e3 * each:g} ms"
    often = "Gradients travel once a step, however many micro-batches it accumulates"
    if forecast.training.program.gathers:
        often, batches = "Parameters are gathered for each micro-batch", ""
    return (
        f"{often}: {' '.join(forecast.typed(row.flags))} saves {plain - row.seconds:.3g} s of it. "
        f"If nothing overlaps, the whole {forecast.training.program.unit} is {WORTH_IT} x as fast "
        f"or more where it computes for at most {most / (WORTH_IT - 1):.3g} s{batches}. "
        f"{_hidden(forecast)}"
    )


def _hidden(forecast: Forecast) -> str:
    """Describe how much communication plain training hides behind a micro-batch."""
    if not (forecast.network.host_rate and forecast.training.crossing):
        return ""
    row, name = forecast.plain, forecast.training.program.name
    if (each := forecast.micro_batch_s) is not None:
        left = row.step_seconds(each) - each
        return (
            f"Behind a micro-batch of {1e3 * each:g} ms plain {name}'s overlaps hide "
            f"{row.seconds - left:.3g} of {row.seconds:.3g} s."
        )
    enough = max(1.5 * (row.seconds - row.forward_seconds), 3 * row.forward_seconds)
    return (
        f"Where a micro-batch computes for {enough:.3g} s or more, plain {name}'s overlaps hide "
        "all of it, and nothing is gained."
    )


def limit_text(forecast: Forecast, machines: Machines) -> str:
    """Describe why servers do not gain by few bits. The text is empty if they do, or if the links
    are the limit."""
    rows = [row for row in forecast.by_servers() if row.wire in FEW_BITS]
    if forecast.few_bits or forecast.best.through_servers or not rows:
        return ""
    if machines.outruns_tcp:
        return (
            f"TCP is counted with {TCP_GBPS:g} Gbit/s of a machine, the fastest that was measured. "
            "Over RDMA (--transport rdma) the NIC moves the bytes."
        )
    row = rows[0]
    limits = {
        "cores": f"the {machines.network_cores:g} cores of a host that servers may take "
        "(--worker-cores)",
        "memory": f"the memory of a machine at {machines.memory_rate / 1e9:g} GB/s (--memory-gbs)",
    }
    if row.limit not in limits:
        return ""
    words = " ".join(forecast.typed(row.flags))
    return f"{words} would need {1e3 * row.seconds:,.1f} ms, for {limits[row.limit]}."


def size_text(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def table(forecast: Forecast) -> str:
    """Return the table of all rows: bytes over the NICs, time, and gain."""
    if not forecast.training.crossing:
        return NOTHING
    timed = bool(forecast.network.host_rate)
    rows = [
        (
            *("arguments", "through servers", "gradients", "parameters", "server"),
            *("ms" if timed else "-", "over plain", "over now", ""),
        )
    ]
    for row in forecast.rows:
        if row.refused:
            rows.append((forecast.name(row), f"refused: {row.refused}", "", "", "", "", "", "", ""))
            continue
        rows.append(
            (
                forecast.name(row),
                " and ".join(row.through_servers) or "nothing",
                size_text(row.gradients),
                size_text(row.parameters) if row.parameters else "-",
                size_text(row.server) if row.server else "-",
                f"{row.seconds * 1e3:.1f}" if timed else "-",
                f"{row.gain:.2f}",
                f"{row.over_now:.2f}",
                note(forecast, row),
            )
        )
    # A refused row's reason may be long, so it does not count for the widths of columns.
    shown = [row for row in rows if row[2]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def note(forecast: Forecast, row: Row) -> str:
    """Return the remark on a row's gain."""
    name = forecast.training.program.name
    if row.compared:
        return f"for comparison: not in {name}; loss {row.loss}"
    if row.plain:
        return f"plain {name} at its best" if row == forecast.plain else f"plain {name}"
    if not row.through_servers:
        return "gain of plain flags" if row.over_now > 1.005 else "left to NCCL"
    return f"{'few bits; ' * row.loses}loss {row.loss}" if row.loss else ""
