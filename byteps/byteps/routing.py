"""The paths that a bucket can take, and which needs the least time on the links, counted in bytes.

Needs no torch: :mod:`byteps.forecast` asks the same before a job starts. :mod:`byteps.torch.routes`
measures rates in a running job.
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
"""What ``--dpu-reduce-backend`` may name.

``collective``: torch.distributed's reduce-scatter or all-reduce, as without BytePS. ``flat``: every
rank pushes its whole bucket. ``node-first``: the ranks of a host sum first, then each pushes a
part. ``auto``: whichever needs the least time on the links."""

MARGIN = 0.97
"""Servers are chosen where they need at most this part of the collective's time: at even bytes a
ring is the faster, by a few hundredths."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Servers and links that the sums of a job share."""

    servers: Servers
    host_rate: float | None
    """Bytes per second each way of a worker host's NIC; None: not known, so that only bytes are
    compared, as if all NICs were alike."""
    server_rate: float | None
    """Of a server's NIC; None: as the host's."""
    collective_rate: float | None = None
    """Bytes per second over a worker host's NIC in a collective; None: as ``host_rate``."""
    measured_bytes: int = 0
    """Rates were measured with a tensor of so many bytes; 0: NICs or settings told them."""

    def seconds(self, route: str, load: Load) -> float:
        """Time of a load; in units of a byte's time where rates are not known."""
        host = self.host_rate or 1.0
        if route == COLLECTIVE and self.collective_rate:
            return load.seconds(self.collective_rate, self.collective_rate)
        return load.seconds(host, (self.server_rate if self.host_rate else None) or host)


@dataclass(frozen=True, kw_only=True)
class Sum:
    """What has to be summed: one bucket group's gradients, over one data-parallel group."""

    hosts: tuple[int, ...]
    """The host of each member, in the order of the group."""
    gradient_bytes: int
    """In the type in which they are summed."""
    wire_bytes: int
    """In the type in which BytePS sends them."""
    sharded: bool = False
    """The distributed optimizer: each rank needs its own shard."""
    instances: int = 1
    """Of that optimizer: consecutive members, equally many, hold all shards once."""
    updated: bool = False
    """Servers keep the optimizer, and answer with parameters instead of the sum."""
    pulled_bytes: int | None = None
    """Size of what servers answer with; None: as much as is sent."""


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
    """Bytes over the NICs, of each route that is possible."""
    seconds: Mapping[str, float]
    """Time of the sum by each route, in seconds: see :meth:`Network.seconds`."""


class Hosts(tuple[int, ...]):
    """The host of each member of a group, hashed once: a group may have thousands."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


# A plan asks the same of every bucket group: groups of thousands are looked at once.
@functools.lru_cache(maxsize=64)
def per_host(hosts: tuple[int, ...]) -> Mapping[int, int]:
    """Members on each host."""
    return MappingProxyType(Counter(hosts))


def can_be_node_first(hosts: tuple[int, ...]) -> bool:
    """Whether there are several hosts, with equally many members each, and more than one."""
    counts = per_host(hosts)
    return len(counts) > 1 and len(set(counts.values())) == 1 and max(counts.values()) > 1


def flows_of(what: Sum) -> dict[str, Flow]:
    """Bytes that a host exchanges with servers, by each route through them that is possible."""
    members = max(per_host(what.hosts).values())
    answer = what.wire_bytes if what.pulled_bytes is None else what.pulled_bytes
    pulled = answer / (len(what.hosts) // what.instances) if what.sharded else answer
    flows = {FLAT: Flow(pushed=members * what.wire_bytes, pulled=members * pulled)}
    if can_be_node_first(what.hosts):
        wanted = members * pulled if what.sharded else answer
        flows[NODE_FIRST] = Flow(pushed=what.wire_bytes, pulled=min(wanted, answer))
    return flows


def loads_of(what: Sum, servers: Servers) -> dict[str, Load]:
    """Bytes over the NICs by each route that is possible."""
    loads = {} if what.updated else {COLLECTIVE: _collective(what)}
    for route, flow in flows_of(what).items():
        loads[route] = cost_model.push_pull(servers, flow.pushed, flow.pulled)
    return loads


def _collective(what: Sum) -> Load:
    each = _sent_by_collective(what.hosts, what.sharded, what.instances)
    return cost_model.Load(host=each * what.gradient_bytes)


@functools.lru_cache(maxsize=64)
def _sent_by_collective(hosts: tuple[int, ...], sharded: bool, instances: int) -> float:
    """For each byte of gradients, over the busiest NIC. As Megatron does it: with the distributed
    optimizer a reduce-scatter within each instance, then an all-reduce of each shard across them.
    """
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
    """The route through servers that needs the least time. `loads`: as `loads_of` has them."""
    loads = loads_of(what, network.servers) if loads is None else loads
    ours = [route for route in loads if route != COLLECTIVE]
    return min(ours, key=lambda route: network.seconds(route, loads[route]))


def decide(what: Sum, network: Network, asked: str = AUTO) -> Decision:
    """The route of a sum: the one that was asked for, if it is possible, else the fastest."""
    loads = loads_of(what, network.servers)
    seconds = {route: network.seconds(route, load) for route, load in loads.items()}

    def decision(route: str, why: str) -> Decision:
        return Decision(route=route, why=why, loads=loads, seconds=seconds)

    one_host = len(per_host(what.hosts)) == 1
    if what.updated:
        return decision(*_for_servers(what, asked))
    if asked == COLLECTIVE or (asked == FLAT and len(what.hosts) > 1):
        return decision(asked, "asked for")
    if len(what.hosts) == 1:
        return decision(COLLECTIVE, "a single rank")
    if one_host:
        return decision(COLLECTIVE, "all ranks are on one host")
    if asked == NODE_FIRST:
        return decision(*_node_first(what, "asked for"))
    ours = best_through_servers(what, network, loads)
    gain = seconds[COLLECTIVE] / seconds[ours]
    if gain * MARGIN >= 1:
        return decision(ours, f"{gain:.2f} x as fast as the collective")
    return decision(COLLECTIVE, f"{ours} would be {gain:.2f} x as fast")


def _node_first(what: Sum, why: str) -> tuple[str, str]:
    """That route, or the flat one with a reason, of a sum over several hosts."""
    if can_be_node_first(what.hosts):
        return NODE_FIRST, why
    counts = sorted(set(per_host(what.hosts).values()))
    if counts == [1]:
        return FLAT, "one rank a host" if why != "asked for" else f"{why}, with one rank a host"
    return FLAT, f"hosts have {' or '.join(map(str, counts))} ranks: not node first"


def _for_servers(what: Sum, asked: str) -> tuple[str, str]:
    """The route where servers keep the optimizer: no collective can take their place, and node
    first each NIC carries the fewest bytes."""
    if asked == FLAT:
        return FLAT, "asked for"
    if len(what.hosts) == 1:
        return FLAT, "a single rank"
    if len(per_host(what.hosts)) == 1:
        return FLAT, "all ranks are on one host"
    return _node_first(what, "asked for" if asked == NODE_FIRST else "fewest bytes")
