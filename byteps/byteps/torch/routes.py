"""Measures the rates that the sum of a bucket reaches by each path of :mod:`byteps.routing`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from byteps.routing import (
    AUTO,
    COLLECTIVE,
    FLAT,
    MARGIN,
    NODE_FIRST,
    ROUTES,
    Decision,
    Network,
    Sum,
    best_through_servers,
    can_be_node_first,
    decide,
    loads_of,
    per_host,
)

__all__ = [
    "AUTO",
    "COLLECTIVE",
    "FLAT",
    "MARGIN",
    "NODE_FIRST",
    "ROUTES",
    "Decision",
    "Measured",
    "Network",
    "Sum",
    "best_through_servers",
    "can_be_node_first",
    "decide",
    "loads_of",
    "measure",
    "per_host",
]

# The cost model only counts bytes. Actual rates also depend on other traffic, the transport and
# cores, and differ between servers and collectives. So before training begins, the members of a
# group sum a scratch tensor by both routes, interleaved.


FIRST_BYTES = 1 << 20
MOST_BYTES = 64 << 20
LONG_ENOUGH_S = 0.3
"""Least time in seconds of a sum from which rates are computed. A shorter sum would measure the
latency: tens of milliseconds on slow links and busy hosts. The latency matters little for the long
buckets of a step."""
ROUNDS = 3

Try = Callable[[torch.Tensor], None]
"""Function that sums a tensor, or a part of it, in place. It returns when the sum is there."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured rates of a sum, in bytes per second over the NIC of a host."""

    size: int
    """Bytes of the measured tensor."""
    rates: Mapping[str, float]
    """Rate by route: the collective, and a route through servers."""

    def applied(self, network: Network) -> Network:
        """Return the network with these rates instead of the NICs' link rates."""
        (servers,) = (rate for route, rate in self.rates.items() if route != COLLECTIVE)
        return replace(
            network,
            host_rate=servers,
            server_rate=None,
            collective_rate=self.rates[COLLECTIVE],
            measured_bytes=self.size,
        )


def measure(
    what: Sum,
    network: Network,
    tries: Mapping[str, Try],
    group: torch.distributed.ProcessGroup,
    like: torch.Tensor,
) -> Measured:
    """Time the collective and the best route through servers; all members of the group call this.

    The tensor grows from 1 MiB until both routes take 0.3 s, at most to 64 MiB or the size of the
    sum. A rate is the median of three sums; the time of a sum is the slowest member's. All members
    get the same rates.

    Args:
        what: the sum that training will make; the scratch tensor has at most its size.
        network: the job's network. Only its loads are used, not its rates.
        tries: for each possible route, a function that sums by it.
        group: the data-parallel group.
        like: a tensor of the gradients' type and device.

    Raises:
        BytePSError: a push-pull failed; the text names the peer.
    """
    ours = best_through_servers(what, replace(network, host_rate=None, server_rate=None))
    ways = (ours, COLLECTIVE)
    most = min(MOST_BYTES, what.gradient_bytes)
    size = min(FIRST_BYTES, most)
    while True:
        members = len(what.hosts)
        # The number is a multiple of the number of members, so that each member owns equally many
        # elements.
        elements = -(-size // like.element_size() // members) * members
        scratch = torch.zeros(elements, dtype=like.dtype, device=like.device)
        for way in ways:
            tries[way](scratch)  # The first sum also declares the tensor and connects.
        once = {way: _seconds(tries[way], scratch, group) for way in ways}
        if size >= most or min(once.values()) >= LONG_ENOUGH_S:
            break
        size = min(4 * size, most)
    rounds = [{way: _seconds(tries[way], scratch, group) for way in ways} for _ in range(ROUNDS)]
    loads = loads_of(
        replace(
            what,
            gradient_bytes=scratch.nbytes,
            wire_bytes=round(scratch.nbytes * what.wire_bytes / what.gradient_bytes),
        ),
        network.servers,
    )
    rates = {}
    for way in ways:
        seconds = statistics.median(seconds_of_round[way] for seconds_of_round in rounds)
        rates[way] = max(loads[way].host, loads[way].server) / seconds
    return Measured(size=scratch.nbytes, rates=rates)


def _seconds(run: Try, scratch: torch.Tensor, group: torch.distributed.ProcessGroup) -> float:
    """Return the time of the slowest member; the same on all of them."""
    _slowest(0.0, scratch.device, group)  # All members begin together.
    begin = time.perf_counter()
    run(scratch)
    if scratch.is_cuda:
        torch.cuda.synchronize(scratch.device)
    return _slowest(time.perf_counter() - begin, scratch.device, group)


def _slowest(seconds: float, device: torch.device, group: torch.distributed.ProcessGroup) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX, group=group)
    return float(value.item())
