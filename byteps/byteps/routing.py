"""Paths that a bucket can take, and the path that needs the least time on the links.

This module needs no torch, so that :mod:`byteps.forecast` can use it before a job starts.
:mod:`byteps.torch.routes` measures rates in a running job.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from byteps import cost_model
from byteps.cost_model import Load, Servers

COLLECTIVE, FLAT, NODE_FIRST, AUTO = "collective", "flat", "node-first", "auto"
ROUTES = (AUTO, FLAT, NODE_FIRST, COLLECTIVE)
"""Values of ``--dpu-reduce-backend``.

``collective``: torch.distributed's reduce-scatter or all-reduce, as without BytePS. ``flat``: every
rank pushes its whole bucket. ``node-first``: the ranks of a host sum first, then each pushes a
part. ``auto``: the backend that needs the least time on the links.
"""

MARGIN = 0.97
"""Servers are chosen if they need at most this fraction of the collective's time. With equal bytes,
a ring is faster by a few percent."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Servers and links that the sums of a job share."""

    servers: Servers
    host_rate: float | None
    """Bytes per second in each direction of a worker host's NIC. None: unknown, so only bytes are
    compared, as if all NICs had the same rate."""
    server_rate: float | None
    """Rate of a server's NIC; None: the same as a host's."""
    collective_rate: float | None = None
    """Bytes per second over a worker host's NIC in a collective; None: ``host_rate``."""
    measured_bytes: int = 0
    """Bytes of the tensor with which rates were measured; 0: rates are from NICs or settings."""

    @property
    def basis(self) -> str:
        """Description of the numbers from which a ratio of two times is computed."""
        if self.measured_bytes:
            return "by measured rates"
        counted = "bytes and rates of the NICs" if self.host_rate else "bytes over the NICs"
        return f"by {counted}, not measured"

    def seconds(self, route: str, load: Load) -> float:
        """Return the time of a load, in seconds; if rates are unknown, in byte times."""
        host = self.host_rate or 1.0
        if route == COLLECTIVE and self.collective_rate:
            return load.seconds(self.collective_rate, self.collective_rate)
        return load.seconds(host, (self.server_rate if self.host_rate else None) or host)


@dataclass(frozen=True, kw_only=True)
class Sum:
    """Sum of a bucket group's gradients over a data-parallel group."""

    hosts: tuple[int, ...]
    """The host of each member, in the order of the group."""
    gradient_bytes: int
    """Bytes in the type in which gradients are summed."""
    wire_bytes: int
    """Bytes in the type in which BytePS sends them."""
    sharded: bool = False
    """Whether the optimizer is distributed: each rank then needs only its own shard."""
    instances: int = 1
    """Number of distributed optimizer instances. The group is cut into this many runs of members,
    equally long; each run holds all shards once."""
    updated: bool = False
    """Whether servers keep the optimizer and answer with parameters instead of the sum."""
    pulled_bytes: int | None = None
    """Bytes of the servers' answers; None: the same as `wire_bytes`."""
    placed: bool = False
    """Whether servers on each rank's host sum the rank's shard."""
    by_all_reduce: bool = False
    """Whether the collective is an all-reduce even if the sum is sharded, as in gloo (measured with
    torch 2.13: 1.50 bytes per byte at 4 ranks, an all-gather 0.75)."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Bytes that the members on one host exchange with servers."""

    pushed: float
    pulled: float


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The backend of a bucket group, with the reason."""

    route: str
    why: str
    loads: Mapping[str, Load]
    """Bytes over the NICs, for each possible route."""
    seconds: Mapping[str, float]
    """Time of the sum by each route: see :meth:`Network.seconds`."""


class Hosts(tuple[int, ...]):
    """The host of each member of a group, hashed once: a group may have thousands of members."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


# The result is cached: a plan asks for the same group once per bucket group, and groups have
# thousands of members.
@functools.lru_cache(maxsize=64)
def per_host(hosts: tuple[int, ...]) -> Mapping[int, int]:
    """Return the number of members on each host."""
    return MappingProxyType(Counter(hosts))


def can_be_node_first(hosts: tuple[int, ...]) -> bool:
    """Return whether there are several hosts, all with the same number of members, and more than
    one."""
    counts = per_host(hosts)
    return len(counts) > 1 and len(set(counts.values())) == 1 and max(counts.values()) > 1


def flows_of(what: Sum) -> dict[str, Flow]:
    """Return the bytes that a host exchanges with servers, for each possible route through
    servers."""
    members = max(per_host(what.hosts).values())
    answer = what.wire_bytes if what.pulled_bytes is None else what.pulled_bytes
    pulled = answer / (len(what.hosts) // what.instances) if what.sharded else answer
    flows = {FLAT: Flow(pushed=members * what.wire_bytes, pulled=members * pulled)}
    if can_be_node_first(what.hosts):
        wanted = members * pulled if what.sharded else answer
        flows[NODE_FIRST] = Flow(pushed=what.wire_bytes, pulled=min(wanted, answer))
    return flows


def loads_of(what: Sum, servers: Servers) -> dict[str, Load]:
    """Return the bytes over the NICs for each possible route."""
    loads = {} if what.updated else {COLLECTIVE: _collective(what)}
    for route, flow in flows_of(what).items():
        if what.placed:
            loads[route] = cost_model.scatter_to_owners(len(per_host(what.hosts)), flow.pushed)
        else:
            loads[route] = cost_model.push_pull(servers, flow.pushed, flow.pulled)
    return loads


def _collective(what: Sum) -> Load:
    is_scattered = what.sharded and not what.by_all_reduce
    each = _sent_by_collective(what.hosts, is_scattered, what.instances)
    return cost_model.Load(host=each * what.gradient_bytes)


@functools.lru_cache(maxsize=64)
def _sent_by_collective(hosts: tuple[int, ...], sharded: bool, instances: int) -> float:
    """Return the bytes over the busiest NIC per byte of gradients. Megatron's distributed optimizer
    reduce-scatters within each instance, then all-reduces each shard across instances."""
    if not sharded:
        return cost_model.all_reduces([hosts], 1.0).host
    shards = len(hosts) // instances
    within = [hosts[first : first + shards] for first in range(0, len(hosts), shards)]
    across = [hosts[shard::shards] for shard in range(shards)] if instances > 1 else []
    scatter = cost_model.reduce_scatters(within, 1.0)
    return scatter.host + cost_model.all_reduces(across, 1.0).host / shards


def best_through_servers(
    what: Sum, network: Network, loads: Mapping[str, Load] | None = None
) -> str:
    """Return the route through servers that needs the least time. `loads`: result of `loads_of`."""
    loads = loads_of(what, network.servers) if loads is None else loads
    ours = [route for route in loads if route != COLLECTIVE]
    return min(ours, key=lambda route: network.seconds(route, loads[route]))


def decide(what: Sum, network: Network, requested: str = AUTO) -> Decision:
    """Decide the route of a sum: the requested route if it is possible, otherwise the fastest."""
    loads = loads_of(what, network.servers)
    seconds = {route: network.seconds(route, load) for route, load in loads.items()}

    def decision(route: str, why: str) -> Decision:
        return Decision(route=route, why=why, loads=loads, seconds=seconds)

    one_host = len(per_host(what.hosts)) == 1
    if what.updated:
        return decision(*_for_servers(what, requested))
    if requested == COLLECTIVE or (requested == FLAT and len(what.hosts) > 1):
        return decision(requested, "asked for")
    if len(what.hosts) == 1:
        return decision(COLLECTIVE, "a single rank")
    if one_host:
        return decision(COLLECTIVE, "all ranks are on one host")
    if requested == NODE_FIRST:
        return decision(*_node_first(what, "asked for"))
    ours = best_through_servers(what, network, loads)
    gain = seconds[COLLECTIVE] / seconds[ours]
    if gain * MARGIN >= 1:
        return decision(ours, f"{gain:.2f} x as fast as the collective, {network.basis}")
    return decision(COLLECTIVE, f"servers would be {gain:.2f} x as fast, {network.basis}")


def _node_first(what: Sum, why: str) -> tuple[str, str]:
    """Return the node-first route for a sum over several hosts. If it is impossible, return the
    flat route, with a reason."""
    if can_be_node_first(what.hosts):
        return NODE_FIRST, why
    counts = sorted(set(per_host(what.hosts).values()))
    if counts == [1]:
        return FLAT, "one rank a host" if why != "asked for" else f"{why}, with one rank a host"
    return FLAT, f"hosts have {' or '.join(map(str, counts))} ranks: not node first"


def _for_servers(what: Sum, requested: str) -> tuple[str, str]:
    """Return the route if servers keep the optimizer. No collective can replace them, and with
    node-first each NIC carries the fewest bytes."""
    if requested == FLAT:
        return FLAT, "asked for"
    if len(what.hosts) == 1:
        return FLAT, "a single rank"
    if len(per_host(what.hosts)) == 1:
        return FLAT, "all ranks are on one host"
    return _node_first(what, "asked for" if requested == NODE_FIRST else "fewest bytes")
