"""The machines of a job: hosts with workers, spare machines for servers, links and cores."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from byteps import cost_model
from byteps.cost_model import Servers
from byteps.routing import Network

GBPS = 1e9 / 8
"""Bytes per second of 1 Gbit/s."""
TRANSPORTS = ("tcp", "rdma")
MOST_NIC_GBPS = 1600.0
"""Largest rate of a single NIC. A larger rate is that of several NICs together."""
OTHER_CORES = 1
"""Cores of a machine that do other work than move and add bytes."""
BLOCK_VALUES_PER_CORE = 4.2e9
"""Values in blocks of few bits that one core adds per second. It adds several pushes in one
pass."""
CORES_PER_GPU = 16.0
"""Assumed cores of a worker's host per GPU, unless the user gives a number."""
MEMORY_RATE = 300e9
"""Assumed bandwidth of a machine's memory, in bytes per second: half of what two sockets with eight
channels of DDR5-4800 each have."""
MEMORY_PASSES = {"tcp": 4, "rdma": 2}
"""Memory accesses per byte that a process sends or receives, by transport: one by the GPU or the
adding core, one by the NIC. Over TCP the kernel's copy adds a read and a write."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines and links of a job."""

    hosts: int
    """Hosts with workers."""
    gpus: int
    """Ranks on each host."""
    link_gbps: float
    """Rate of one NIC of a worker's host, in each direction."""
    nics: int = 1
    """NICs of a worker's host. NCCL uses all of them, and so does BytePS."""
    spare: int = 0
    """Machines with servers and no workers; 0: servers run on the workers' hosts alone."""
    server_link_gbps: float | None = None
    """Rate of all NICs of a spare machine together, in each direction; None: the same as
    `link_gbps`."""
    transport: str = "tcp"
    """Transport between workers and servers, one of TRANSPORTS."""
    worker_cores: float | None = None
    """Cores of a worker's host that the network may use. None: half of the cores that ranks leave
    free, as in embedded mode; a host then has CORES_PER_GPU cores per GPU, and a rank takes one."""
    server_cores: float = math.inf
    """Cores of a spare machine."""
    core_rate: float = cost_model.TCP_CORE_RATE
    """Bytes per second that one core sends or receives over TCP."""
    add_rate: float = cost_model.ADD_CORE_RATE
    """Bytes per second that one core of a server adds."""
    memory_rate: float = MEMORY_RATE
    """Bandwidth of a machine's memory, in bytes per second."""
    micro_batch_s: float | None = None
    """Computing time of a micro-batch on a GPU, in seconds; None: unknown."""
    backup: bool = False
    """Whether each server keeps a copy of another server's optimizer state
    (BYTEPS_BACKUP_STATE)."""

    def __post_init__(self) -> None:
        """Raise ValueError for impossible numbers, and for settings that BytePS does not
        support."""
        for name in ("hosts", "gpus", "nics"):
            if not 1 <= getattr(self, name) <= 65535:
                raise ValueError(f"--{name} {getattr(self, name)}: there must be 1 to 65535")
        if self.spare < 0:
            raise ValueError(f"--machines {self.spare}: there cannot be fewer than 0")
        for option, rate in (
            ("--link-gbps", self.link_gbps), ("--server-link-gbps", self.server_gbps),
            ("--core-gbps", self.core_rate), ("--core-add-gbs", self.add_rate),
            ("--memory-gbs", self.memory_rate),
        ):  # fmt: skip
            if not 0 < rate < math.inf:
                raise ValueError(f"{option} is {rate:g}: it must be above 0")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport is '{self.transport}', not {' or '.join(TRANSPORTS)}")
        for whose, number in (
            ("worker's host", self.network_cores), ("server's machine", self.server_cores),
        ):  # fmt: skip
            if not number > OTHER_CORES:
                raise ValueError(
                    f"{cores_text(number)} of a {whose} are too few: {OTHER_CORES} do other work "
                    "than to move and add bytes, so give more than that"
                )
        if self.backup and self.transport != "tcp":
            raise ValueError("copies of the servers' state travel over TCP only")
        if self.link_gbps > MOST_NIC_GBPS:
            raise ValueError(
                f"{self.link_gbps:g} Gbit/s of a worker's host: no NIC is faster than "
                f"{MOST_NIC_GBPS:g}. Give the rate of one NIC (--link-gbps); --nics says how many "
                "a worker's host has"
            )

    @property
    def world(self) -> int:
        """Number of ranks of the job."""
        return self.hosts * self.gpus

    @property
    def network_cores(self) -> float:
        """Cores of a worker's host that the network may use."""
        if self.worker_cores is not None:
            return self.worker_cores
        return (CORES_PER_GPU - 1) * self.gpus / 2

    @property
    def outruns_tcp(self) -> bool:
        """Whether links are faster than any over which TCP was measured."""
        fastest = max(self.nics * self.link_gbps, self.server_gbps if self.spare else 0.0)
        return self.transport == "tcp" and fastest > cost_model.TCP_GBPS

    @property
    def server_gbps(self) -> float:
        """Rate of all NICs of a spare machine together."""
        return self.link_gbps if self.server_link_gbps is None else self.server_link_gbps

    @property
    def network(self) -> Network:
        """Links, and the placement of servers that takes the least time."""
        choices = [cost_model.best_servers(self.hosts, self.spare)]
        if self.spare:
            choices.append(Servers(hosts=self.hosts, extra=self.spare))
        link, most = self.nics * self.link_gbps, math.inf
        if self.transport == "tcp":
            most = cost_model.TCP_GBPS
        networks = [
            Network(
                servers=servers,
                host_rate=min(link, most) * GBPS,
                server_rate=min(self.server_gbps, most) * GBPS,
                collective_rate=link * GBPS if link > most else None,
            )
            for servers in choices
        ]
        return min(
            networks, key=lambda network: (self.seconds(network, 1.0, 1.0), network.servers.count)
        )

    def seconds(
        self, network: Network, pushed: float, pulled: float, add_rate: float | None = None
    ) -> float:
        """Return the time of a push-pull in which each host pushes and pulls these bytes: the
        longest time of NICs, cores and memory."""
        load = cost_model.push_pull(network.servers, pushed, pulled)
        links = load.seconds(network.host_rate or 1.0, network.server_rate or 1.0)
        return max(links, *self.limits(network.servers, pushed, pulled, add_rate).values())

    def limits(
        self,
        servers: Servers,
        pushed: float,
        pulled: float,
        add_rate: float | None = None,
        copied: float = 0.0,
    ) -> dict[str, float]:
        """Return, for the busiest machine, the time in seconds that its cores need for a push-pull,
        and the time that its memory needs.

        Args:
            copied: bytes of optimizer state that each server process sends to another one, and
                receives.
        """
        cores = self.busy(servers, pushed, pulled, add_rate)
        memory = cost_model.core_seconds(
            servers,
            pushed,
            pulled,
            core_rate=self.memory_rate / MEMORY_PASSES[self.transport],
            add_rate=math.inf,
        )
        copies = 0.0 if self.transport == "rdma" else 2 * copied / self.core_rate
        own = copies * servers.per_machine if servers.extra else 0.0
        return {
            "cores": max(
                (cores.host + copies * servers.local) / (self.network_cores - OTHER_CORES),
                (cores.server + own) / (self.server_cores - OTHER_CORES),
            ),
            "memory": max(memory.host, memory.server),
        }

    def busy(
        self, servers: Servers, pushed: float, pulled: float, add_rate: float | None = None
    ) -> cost_model.CoreSeconds:
        """Return the CPU time of a push-pull in which each host pushes and pulls these bytes."""
        return cost_model.core_seconds(
            servers,
            pushed,
            pulled,
            core_rate=math.inf if self.transport == "rdma" else self.core_rate,
            add_rate=add_rate or self.add_rate,
        )

    def with_all_cores(self) -> Machines:
        """Return the same machines with as many cores as they need."""
        return replace(self, worker_cores=math.inf, server_cores=math.inf)


def cores_text(number: float) -> str:
    return f"{number:g} core{'s' if number != 1 else ''}"
