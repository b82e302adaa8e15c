"""What all workers of a job tell each other when it starts: their hosts, links and servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from byteps.cost_model import Servers
from byteps.launcher import embedded
from byteps.torch import declarations
from byteps.torch.figures import setting
from byteps.torch.hosts import host_name
from byteps.torch.routes import Network
from byteps.torch.session import BytePSError
from byteps.torch.world import num_servers

_GBPS = 1e9 / 8


class Told(NamedTuple):
    """What one worker tells the others. Of plain types, so that it travels as JSON too."""

    host: str
    server_link_gbps: float
    local_servers: int
    """Servers on each worker's host; -1: all of them are."""
    servers_per_machine: int
    measures: bool
    """Whether it would have rates measured."""


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
        BytePSError: ranks have different settings of servers, or such as cannot be.
    """
    mine = Told(
        host=host_name(),
        server_link_gbps=float(setting("BYTEPS_SERVER_LINK_GBPS")),
        local_servers=-1 if embedded.is_running() else int(setting("BYTEPS_LOCAL_SERVERS")),
        servers_per_machine=int(setting("BYTEPS_SERVERS_PER_MACHINE")),
        measures=setting("BYTEPS_MEASURE_LINKS") == "1" and not float(setting("BYTEPS_LINK_GBPS")),
    )
    told = exchange(mine)
    for variable, values in (
        ("BYTEPS_LOCAL_SERVERS", {one.local_servers for one in told}),
        ("BYTEPS_SERVERS_PER_MACHINE", {one.servers_per_machine for one in told}),
    ):
        if len(values) > 1:
            raise BytePSError(f"ranks disagree on {variable}: {sorted(values)}")
    numbers = {name: index for index, name in enumerate(dict.fromkeys(one.host for one in told))}
    # One plan for all ranks: the slowest NIC decides, and a rate that a rank does not know is not
    # known.
    host = declarations.link_gbps()
    server = min(one.server_link_gbps for one in told)
    return Job(
        hosts=tuple(numbers[one.host] for one in told),
        network=Network(
            servers=_servers(len(numbers), mine),
            host_rate=host * _GBPS or None,
            server_rate=server * _GBPS or None,
        ),
        measures=all(one.measures for one in told),
    )


def _servers(hosts: int, told: Told) -> Servers:
    count, local = num_servers(), told.local_servers
    if local < 0:
        return Servers(hosts=hosts, extra=0, local=max(1, count // hosts))
    if local * hosts > count:
        raise BytePSError(
            f"BYTEPS_LOCAL_SERVERS={local} on {hosts} hosts are more than the job's {count} servers"
        )
    extra = count - local * hosts
    if extra % told.servers_per_machine:
        raise BytePSError(
            f"{extra} servers on machines of their own are no whole number of machines with "
            f"BYTEPS_SERVERS_PER_MACHINE={told.servers_per_machine}"
        )
    return Servers(
        hosts=hosts,
        extra=extra // told.servers_per_machine,
        local=local,
        per_machine=told.servers_per_machine,
    )
