"""The machines of a job: hosts with workers, spare machines for servers, links and cores."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from byteps import cost_model
from byteps.cost_model import Servers
from byteps.routing import Network

GBPS = 1e9 / 8
"""Bytes per second."""
TRANSPORTS = ("tcp", "rdma")
MOST_NIC_GBPS = 1600.0
"""A higher rate is that of several NICs together."""
OTHER_CORES = 1
"""Cores for all else than moving and adding bytes."""
BLOCK_VALUES_PER_CORE = 4.2e9
"""Values in blocks of few bits that a core adds per second, several pushes in one pass."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines and links of a job."""

    hosts: int
    """Hosts with workers."""
    gpus: int
    """Ranks on each host."""
    link_gbps: float
    """Rate of one NIC of a worker's host, each way."""
    nics: int = 1
    """NICs of a worker's host. NCCL uses all of them, and so does BytePS."""
    spare: int = 0
    """Machines with servers and no workers; 0: servers run on the workers' hosts alone."""
    server_link_gbps: float | None = None
    """Rate of a spare machine's NICs together, each way; None: as `link_gbps`."""
    transport: str = "tcp"
    """Between workers and servers, one of TRANSPORTS."""
    worker_cores: float = math.inf
    """Cores of a worker's host that the network may use."""
    server_cores: float = math.inf
    """Cores of a spare machine."""
    core_rate: float = cost_model.TCP_CORE_RATE
    """Bytes per second that one core sends or receives over TCP."""
    add_rate: float = cost_model.ADD_CORE_RATE
    """Bytes per second that one core of a server adds."""
    backup: bool = False
    """Each server keeps a copy of another one's optimizer state (BYTEPS_BACKUP_STATE)."""

    def __post_init__(self) -> None:
        """Raises ValueError for what is no size, and for what BytePS cannot use."""
        for name in ("hosts", "gpus", "nics"):
            if not 1 <= getattr(self, name) <= 65535:
                raise ValueError(f"--{name} {getattr(self, name)}: there must be 1 to 65535")
        if self.spare < 0:
            raise ValueError(f"--machines {self.spare}: there cannot be fewer than 0")
        for option, rate in (
            ("--link-gbps", self.link_gbps), ("--server-link-gbps", self.server_gbps),
            ("--core-gbps", self.core_rate), ("--core-add-gbs", self.add_rate),
        ):  # fmt: skip
            if not 0 < rate < math.inf:
                raise ValueError(f"{option} is {rate:g}: it must be above 0")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport is '{self.transport}', not {' or '.join(TRANSPORTS)}")
        for whose, number in (
            ("worker's host", self.worker_cores), ("server's machine", self.server_cores),
        ):  # fmt: skip
            if not number > OTHER_CORES:
                raise ValueError(
                    f"{cores_text(number)} of a {whose}: there must be more than {OTHER_CORES}, "
                    "which is for all else than moving and adding bytes"
                )
        if self.backup and self.transport != "tcp":
            raise ValueError("copies of the servers' state travel over TCP only")
        self._check_link("a worker's host", "--link-gbps", self.link_gbps, self.nics)
        if self.spare or self.server_link_gbps is not None:
            self._check_link("a server", "--server-link-gbps", self.server_gbps, 1)

    def _check_link(self, whose: str, option: str, nic_gbps: float, nics: int) -> None:
        gbps = nic_gbps * nics
        if nic_gbps > MOST_NIC_GBPS:
            text = f"{nic_gbps:g} Gbit/s of {whose}: no NIC is faster than {MOST_NIC_GBPS:g}. Give "
            text += f"the rate of one NIC ({option}); --nics says how many a worker's host has"
            raise ValueError(text)
        if self.transport == "tcp" and gbps > cost_model.TCP_GBPS:
            rate = gbps * GBPS
            cores = math.ceil(2 * rate / self.core_rate + rate / self.add_rate) + OTHER_CORES
            raise ValueError(
                f"{gbps:g} Gbit/s of {whose}: TCP is for up to {cost_model.TCP_GBPS:g} Gbit/s. For "
                f"this link a server would need {cores} cores. Use RDMA (--transport rdma), or "
                f"plan with what TCP carries ({option} {cost_model.TCP_GBPS / nics:g})"
            )

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.hosts * self.gpus

    @property
    def server_gbps(self) -> float:
        """Rate of a spare machine's NICs together."""
        return self.link_gbps if self.server_link_gbps is None else self.server_link_gbps

    @property
    def network(self) -> Network:
        """The links, and servers where they take the least time."""
        choices = [cost_model.best_servers(self.hosts, self.spare)]
        if self.spare:
            choices.append(Servers(hosts=self.hosts, extra=self.spare))
        host, server = self.nics * self.link_gbps * GBPS, self.server_gbps * GBPS
        networks = [
            Network(servers=servers, host_rate=host, server_rate=server) for servers in choices
        ]
        return min(networks, key=lambda one: (self.seconds(one, 1.0, 1.0), one.servers.count))

    def seconds(
        self, network: Network, pushed: float, pulled: float, add_rate: float | None = None
    ) -> float:
        """Time of a push-pull of so many bytes per host, by the NICs or by the cores."""
        load = cost_model.push_pull(network.servers, pushed, pulled)
        busy = self.busy(network.servers, pushed, pulled, add_rate)
        return max(
            load.seconds(network.host_rate or 1.0, network.server_rate or 1.0),
            busy.host / (self.worker_cores - OTHER_CORES),
            busy.server / (self.server_cores - OTHER_CORES),
        )

    def busy(
        self, servers: Servers, pushed: float, pulled: float, add_rate: float | None = None
    ) -> cost_model.CoreSeconds:
        """CPU time of a push-pull of so many bytes per host."""
        return cost_model.core_seconds(
            servers,
            pushed,
            pulled,
            core_rate=math.inf if self.transport == "rdma" else self.core_rate,
            add_rate=add_rate or self.add_rate,
        )

    def with_all_cores(self) -> Machines:
        """The same machines with as many cores as they need."""
        return replace(self, worker_cores=math.inf, server_cores=math.inf)


def cores_text(number: float) -> str:
    return f"{number:g} core{'s' if number != 1 else ''}"
