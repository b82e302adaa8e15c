"""All workers and servers of the job: their hosts, their links, and what they tell each other."""

from __future__ import annotations

import functools
import ipaddress
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from byteps.cost_model import Servers
from byteps.launcher import embedded, places
from byteps.launcher.places import LocalPlace
from byteps.torch import c_lib, engine, operations, session
from byteps.torch.figures import setting
from byteps.torch.routes import Network
from byteps.torch.session import BytePSError

__all__ = ["barrier", "num_servers"]


def host_name() -> str:
    """Name of this host in the job: see `places.host_name`."""
    return places.host_name(setting("BYTEPS_HOST_ID", str))


def find_place(
    rank: int, exchange: Callable[[LocalPlace], Sequence[LocalPlace]]
) -> tuple[int, int]:
    """This rank's number among those of its host, and how many these are, also where the launcher
    has told none that can be. A place that BYTEPS_LOCAL_RANK and BYTEPS_LOCAL_SIZE name is kept.

    All ranks of the job call this before `init`, and hand it what is found.

    Args:
        rank: of this process among all that call.
        exchange: returns what each rank gives it, in the order of ranks.
    """
    mine = LocalPlace.own(os.environ, host_name())
    return places.find_locals(exchange(mine))[rank]


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """How the ranks of a group are spread over hosts."""

    hosts: tuple[tuple[int, ...], ...]
    """Global ranks of each host, in the order of the group; hosts by their first rank's place."""

    @staticmethod
    def of(ranks: Sequence[int], names: Sequence[str]) -> HostLayout:
        """The layout of these ranks, of which each is on the host of the same place in `names`."""
        hosts: dict[str, list[int]] = {}
        for rank, name in zip(ranks, names, strict=True):
            hosts.setdefault(name, []).append(rank)
        return HostLayout(hosts=tuple(tuple(members) for members in hosts.values()))

    @functools.cached_property
    def per_host(self) -> int | None:
        """Ranks on each host; None where hosts have different numbers."""
        sizes = {len(members) for members in self.hosts}
        return sizes.pop() if len(sizes) == 1 else None

    def host_of(self, rank: int) -> int:
        """Which of `hosts` a rank is on. Raises ValueError for a rank that is no member."""
        return self._place(rank)[0]

    def _place(self, rank: int) -> tuple[int, int]:
        """Its host, and its place among the ranks of that."""
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
        """The ranks of its host, itself among them."""
        return self.hosts[self.host_of(rank)]

    def local_index(self, rank: int) -> int:
        """Its place among the ranks of its host."""
        return self._place(rank)[1]

    def across(self, rank: int) -> tuple[int, ...]:
        """The ranks of the same local index, one a host. Only where `per_host` is not None."""
        return self._across[self.local_index(rank)]

    @functools.cached_property
    def _across(self) -> tuple[tuple[int, ...], ...]:
        """By local index: each the same object whenever it is asked for."""
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
)
"""Settings that decide what a rank sends, and where to. Ranks with different values would wait for
each other."""


class Told(NamedTuple):
    """What one worker tells the others. Of plain types, so that it travels as JSON too."""

    host: str
    server_link_gbps: float
    local_servers: int
    """Servers on each worker's host; -1: all of them are."""
    servers_per_machine: int
    """0: as the servers' addresses say."""
    measures: bool
    """Whether it would have rates measured."""
    alike: Sequence[Setting]
    """Its values of ALIKE, in that order."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all workers told."""

    hosts: tuple[int, ...]
    """Of each rank: a number for each host."""
    network: Network
    measures: bool
    """Whether rates are measured before anything is decided."""


def meet(exchange: Callable[[Told], Sequence[Told]]) -> Job:
    """Learn every rank's host and link; all workers of the job call this, after `init`.

    Args:
        exchange: returns what each rank gives it, in the order of ranks.

    Raises:
        BytePSError: ranks have different values of a setting in ALIKE, or such as cannot be.
    """
    mine = Told(
        host=host_name(),
        server_link_gbps=setting("BYTEPS_SERVER_LINK_GBPS", float),
        local_servers=-1 if embedded.is_running() else setting("BYTEPS_LOCAL_SERVERS", int),
        servers_per_machine=setting("BYTEPS_SERVERS_PER_MACHINE", int),
        measures=setting("BYTEPS_MEASURE_LINKS", bool) and not setting("BYTEPS_LINK_GBPS", float),
        alike=[c_lib.setting(name) for name in ALIKE],
    )
    told = exchange(mine)
    for number, name in enumerate(ALIKE):
        _demand_alike(name, [one.alike[number] for one in told])
    numbers = {name: index for index, name in enumerate(dict.fromkeys(one.host for one in told))}
    # One plan for all ranks: the slowest NIC decides, and a rate that a rank does not know is not
    # known.
    host = engine.link_gbps()
    server = min(one.server_link_gbps for one in told)
    return Job(
        hosts=tuple(numbers[one.host] for one in told),
        network=Network(
            servers=_servers(len(numbers), mine, engine.server_hosts()),
            host_rate=host * _GBPS or None,
            server_rate=server * _GBPS or None,
        ),
        measures=all(one.measures for one in told),
    )


def _demand_alike(name: str, values: Sequence[Setting]) -> None:
    """Raises BytePSError unless all ranks have the first one's value of a setting."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise BytePSError(
                f"ranks have different values of {name}: {values[0]} on rank 0, {value} on rank "
                f"{rank}. Set it alike on all hosts, or on none"
            )


def _servers(hosts: int, told: Told, addresses: Sequence[str]) -> Servers:
    count, local = len(addresses), told.local_servers
    if local < 0:
        return Servers(hosts=hosts, extra=0, local=max(1, count // hosts))
    if local * hosts > count:
        raise BytePSError(
            f"BYTEPS_LOCAL_SERVERS={local} on {hosts} hosts are more than the job's {count} servers"
        )
    extra = count - local * hosts
    machines = len(set(addresses)) - (hosts if local else 0)
    each = told.servers_per_machine or _per_machine(extra, machines, addresses)
    if extra % each:
        raise BytePSError(
            f"{extra} servers on machines of their own are no whole number of machines with "
            f"BYTEPS_SERVERS_PER_MACHINE={each}"
        )
    return Servers(hosts=hosts, extra=extra // each, local=local, per_machine=each)


def _per_machine(extra: int, machines: int, addresses: Sequence[str]) -> int:
    """Servers on each of the server machines; one, where the servers' addresses do not tell:
    where they are inside a host, as emulated machines are, or machines have different numbers."""
    tell = machines > 0 and extra % machines == 0 and not any(map(_is_inside, addresses))
    return max(1, extra // machines) if tell else 1


def _is_inside(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address in ("", "localhost")


def num_servers() -> int:
    """Servers of the job. Raises BytePSError where this process is in none."""
    session.launched()
    return len(engine.bytes_per_server(1, name="count"))


def barrier() -> None:
    """Block until all workers have called it.

    Raises:
        BytePSError: the job failed, or one did not come within BYTEPS_OP_TIMEOUT_S.
    """
    one = torch.ones(1, dtype=torch.int32)
    handle = operations.start(
        one, one, average=False, name="byteps/barrier", priority=0, group=None, placement=None
    )
    operations.synchronize(handle)
