"""Rules for how much a worker hands to the transport ahead of the link, compared by simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.kit.units import show_size
from bench.simulator.incast import Incast, push
from bench.simulator.scenario import Scenario, engine_window
from bench.simulator.simulation import push_pull

_URGENT = 1 << 20  # bytes
_BUFFER = 3 << 20  # bytes that Linux lets a socket take, unless it is told otherwise
_LOW_WATER = 256 << 10  # bytes that it takes with TCP_NOTSENT_LOWAT
_CREDIT = 16  # partitions over all servers
HEAD = ("workers", "rule", "window", "over M/B", "urgent ms", "others over M/B")


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
