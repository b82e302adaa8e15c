"""All workers and servers of the job: their hosts and links, and the settings that workers
exchange."""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from byteps.cost_model import Servers
from byteps.launcher import embedded, meeting, places
from byteps.launcher.places import LocalPlace, host_name
from byteps.torch import c_lib, engine, operations, session
from byteps.torch.figures import setting
from byteps.torch.routes import Network
from byteps.torch.session import BytePSError

__all__ = ["barrier", "num_servers"]


def find_place(
    rank: int, exchange: Callable[[LocalPlace], Sequence[LocalPlace]]
) -> tuple[int, int]:
    """Find this rank's local rank and local size, even if the launcher has set none, or wrong ones.
    Values of BYTEPS_LOCAL_RANK and BYTEPS_LOCAL_SIZE are kept.

    All ranks of the job call this before `init`, and pass the result to `init`.

    Args:
        rank: rank of this process among all callers.
        exchange: all-gathers an object: returns each rank's argument, in the order of ranks.
    """
    own = LocalPlace.own(os.environ, host_name())
    return places.find_locals(exchange(own))[rank]


def demand_all(store: meeting.Store, rank: int, size: int, flag: str) -> None:
    """Return when all ranks of torch.distributed have called this.

    A rank that was not told to use BytePS goes on to another collective. So this function uses the
    store: a collective would hang.

    Args:
        store: torch.distributed's store.
        flag: flag or variable that makes a rank call this, for the error.

    Raises:
        BytePSError: a rank has not called this within BYTEPS_START_TIMEOUT_S. The text names it.
    """
    limit_s = setting("BYTEPS_START_TIMEOUT_S", float)
    try:
        meeting.meet(store, "ranks", rank, size, time.monotonic() + limit_s)
    except meeting.AbsentError as error:
        raise BytePSError(
            f"ranks {error.members} of {size} did not start BytePS within {limit_s:g} s "
            f"(BYTEPS_START_TIMEOUT_S): give every host the same launch line, with {flag}"
        ) from None


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """Distribution of a group's ranks over hosts."""

    hosts: tuple[tuple[int, ...], ...]
    """Global ranks of each host, in the order of the group. Hosts are ordered by their
    first rank."""

    @staticmethod
    def of(ranks: Sequence[int], names: Sequence[str]) -> HostLayout:
        """Build the layout of these ranks. `names` has the host of each rank."""
        hosts: dict[str, list[int]] = {}
        for rank, name in zip(ranks, names, strict=True):
            hosts.setdefault(name, []).append(rank)
        return HostLayout(hosts=tuple(tuple(members) for members in hosts.values()))

    @functools.cached_property
    def per_host(self) -> int | None:
        """Ranks per host; None if hosts have different numbers."""
        sizes = {len(members) for members in self.hosts}
        return sizes.pop() if len(sizes) == 1 else None

    def host_of(self, rank: int) -> int:
        """Return the index in `hosts` of a rank's host. Raises ValueError if the rank is no
        member."""
        return self._indices(rank)[0]

    def _indices(self, rank: int) -> tuple[int, int]:
        """Return the index of the rank's host, and the rank's index on that host."""
        if rank not in self._places:
            raise ValueError(f"rank {rank} is none of {self.hosts}")
        return self._places[rank]

    @functools.cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (host, local)
            for host, members in enumerate(self.hosts)
            for local, rank in enumerate(members)
        }

    def on_host_of(self, rank: int) -> tuple[int, ...]:
        return self.hosts[self.host_of(rank)]

    def local_index(self, rank: int) -> int:
        """Return the index of a rank among the ranks of its host."""
        return self._indices(rank)[1]

    def across(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same local index, one per host. Call this only if `per_host` is
        not None."""
        return self._across[self.local_index(rank)]

    @functools.cached_property
    def _across(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by local index. The result is cached, so that each call returns the same tuple
        object."""
        return tuple(zip(*self.hosts, strict=True))


_GBPS = 1e9 / 8


Setting = bool | float | int | str
ALIKE = (
    "BYTEPS_LOCAL_SERVERS",
    "BYTEPS_SERVERS_PER_MACHINE",
    "BYTEPS_PARTITION_BYTES",
    "BYTEPS_MIN_PARTITION_BYTES",
    "BYTEPS_NODE_PIECE_BYTES",
    "BYTEPS_KEY_HASH_FN",
    "BYTEPS_STOCHASTIC_ROUNDING",
    "BYTEPS_KEEP_BF16_BYTES",
    "BYTEPS_C10D_BACKEND",
    "BYTEPS_C10D_MIN_BYTES",
    "BYTEPS_C10D_WIRE_DTYPE",
    "BYTEPS_FSDP_DTYPES",
)
"""Settings that decide which bytes a rank sends to which server. If they differed between ranks,
ranks would wait for each other for ever."""


class RankFacts(NamedTuple):
    """Values that a worker sends to all other workers. The types are plain, because the values also
    travel as JSON."""

    host: str
    server_link_gbps: float
    local_servers: int
    """Number of servers on each worker's host; -1: all servers are on workers' hosts."""
    servers_per_machine: int
    """Servers per server machine; 0: found from the servers' addresses."""
    measures: bool
    """Whether this worker's settings ask for measured rates."""
    alike: Sequence[Setting]
    """This worker's values of the settings in ALIKE, in the same order."""
    own_servers: Sequence[int] = ()
    """Ranks of the servers whose address is an address of this worker's host."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Values that all workers have exchanged."""

    hosts: tuple[int, ...]
    """Host number of each rank."""
    network: Network
    measures: bool
    """Whether rates are measured before routes are decided."""
    servers_on: tuple[tuple[int, ...], ...] = ()
    """Ranks of the servers on each host. It contains all servers of the job, equally many on each
    host. It is empty if that is impossible, or if addresses do not tell the servers' hosts."""


def meet(exchange: Callable[[RankFacts], Sequence[RankFacts]]) -> Job:
    """Exchange every rank's host and link. All workers of the job call this, after `init`.

    Args:
        exchange: all-gathers an object: returns each rank's argument, in the order of ranks.

    Raises:
        BytePSError: ranks have different values of a setting in ALIKE, or invalid values.
    """
    own = RankFacts(
        host=host_name(),
        server_link_gbps=setting("BYTEPS_SERVER_LINK_GBPS", float),
        local_servers=-1 if embedded.is_running() else setting("BYTEPS_LOCAL_SERVERS", int),
        servers_per_machine=setting("BYTEPS_SERVERS_PER_MACHINE", int),
        measures=setting("BYTEPS_MEASURE_LINKS", bool) and not setting("BYTEPS_LINK_GBPS", float),
        alike=[c_lib.setting(name) for name in ALIKE],
        own_servers=_own(engine.server_hosts()),
    )
    ranks = exchange(own)
    for number, name in enumerate(ALIKE):
        _demand_alike(name, [rank.alike[number] for rank in ranks])
    numbers = {name: index for index, name in enumerate(dict.fromkeys(rank.host for rank in ranks))}
    # All ranks need the same plan. So the slowest NIC decides, and a rate that is unknown to one
    # rank counts as unknown.
    host = engine.link_gbps()
    server = min(rank.server_link_gbps for rank in ranks)
    return Job(
        hosts=tuple(numbers[rank.host] for rank in ranks),
        network=Network(
            servers=_servers(len(numbers), own, engine.server_hosts()),
            host_rate=host * _GBPS or None,
            server_rate=server * _GBPS or None,
        ),
        measures=all(rank.measures for rank in ranks),
        servers_on=_servers_on([numbers[rank.host] for rank in ranks], ranks),
    )


def _own(addresses: Sequence[str]) -> list[int]:
    """Return the indices of the addresses that belong to this host."""
    own = {address for address in set(addresses) if address and _can_bind(address)}
    return [index for index, address in enumerate(addresses) if address in own]


def _can_bind(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _servers_on(hosts: Sequence[int], ranks: Sequence[RankFacts]) -> tuple[tuple[int, ...], ...]:
    """Return the value of `Job.servers_on`. Hosts that are emulated on one machine all have the
    same addresses."""
    servers_of: dict[int, tuple[int, ...]] = {}
    for host, rank in zip(hosts, ranks, strict=True):
        servers_of.setdefault(host, tuple(rank.own_servers))
    every = [server for servers in servers_of.values() for server in servers]
    is_dealt = sorted(every) == list(range(len(engine.server_hosts())))
    if not is_dealt or len({len(servers) for servers in servers_of.values()}) != 1:
        return ()
    return tuple(servers_of[host] for host in range(len(servers_of)))


def _demand_alike(name: str, values: Sequence[Setting]) -> None:
    """Raise BytePSError unless all ranks have the same value of a setting."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise BytePSError(
                f"ranks have different values of {name}: {values[0]} on rank 0, {value} on rank "
                f"{rank}. Set it alike on all hosts, or on none"
            )


def _servers(hosts: int, facts: RankFacts, addresses: Sequence[str]) -> Servers:
    count, local = len(addresses), facts.local_servers
    if local < 0:
        return Servers(hosts=hosts, extra=0, local=max(1, count // hosts))
    if local * hosts > count:
        raise BytePSError(
            f"BYTEPS_LOCAL_SERVERS={local} on {hosts} hosts are more than the job's {count} servers"
        )
    extra = count - local * hosts
    machines = len(set(addresses)) - (hosts if local else 0)
    each = facts.servers_per_machine or _per_machine(extra, machines, addresses)
    if extra % each:
        raise BytePSError(
            f"{extra} servers on machines of their own are no whole number of machines with "
            f"BYTEPS_SERVERS_PER_MACHINE={each}"
        )
    return Servers(hosts=hosts, extra=extra // each, local=local, per_machine=each)


def _per_machine(extra: int, machines: int, addresses: Sequence[str]) -> int:
    """Return the number of servers per server machine. Return 1 if the addresses do not tell it,
    because they are inside a host (emulated machines), or because machines have different
    numbers."""
    tell = machines > 0 and extra % machines == 0 and not any(map(_is_inside, addresses))
    return max(1, extra // machines) if tell else 1


def _is_inside(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address in ("", "localhost")


def num_servers() -> int:
    """Return the number of servers of the job. Raises BytePSError if this process is in no job."""
    session.launched()
    return len(engine.bytes_per_server(1, name="count"))


def barrier() -> None:
    """Block until all workers have called this.

    Raises:
        BytePSError: the job failed, or a worker did not call within BYTEPS_OP_TIMEOUT_S.
    """
    arrived = torch.ones(1, dtype=torch.int32)
    handle = operations.start(
        arrived,
        arrived,
        average=False,
        name="byteps/barrier",
        priority=0,
        group=None,
        placement=None,
    )
    operations.synchronize(handle)
