"""Servers of each host in embedded mode, fitted to the host's cores and NICs."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from byteps.cost_model import TCP_CORE_RATE
from byteps.forecast.machines import BLOCK_VALUES_PER_CORE, GBPS
from byteps.forecast.needs import BASE_BYTES, GIB, POOL_BYTES
from byteps.forecast.training import FEW_BITS
from byteps.launcher.places import setting

UNKNOWN_GBPS = 40.0
"""Assumed rate of a NIC for which the kernel reports none. The default of BYTEPS_CONNECTIONS
assumes the same."""
LEAST_ADDING = 4
MOST_IO, MOST_ADDING, MOST_SERVERS = 64, 256, 8
CLOSE = 0.1
"""Largest relative difference between a host's number of servers and its share by the NICs'
rates."""
_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

Means = Mapping[str, Any]
"""Resources of a host, as one of its ranks reports them: see `means_of_host`."""


def means_of_host(address: str) -> Means:
    """Return the resources that this host has for servers. Each rank reports them to rank 0.

    If the launcher has bound a rank to some cores, the rank reports only these cores. The ranks of
    a host together report all of them.

    Args:
        address: address of this host, which its servers use; empty: unknown.
    """
    from byteps.torch import c_lib

    mbps, nodes, near = c_lib.nics_of_server(address)
    return {
        "servers": _given("BYTEPS_EMBEDDED_SERVERS"),
        "cores": _mask(os.sched_getaffinity(0)),
        "near": _mask(near),
        "quota": _quota(),
        "gbps": setting("BYTEPS_LINK_GBPS", float) or mbps / 1000,
        "nodes": nodes,
    }


def _given(name: str) -> int:
    """Return the number that the environment sets; 0 if it is not set."""
    return setting(name, int) if name in os.environ else 0


def _mask(cores: Collection[int]) -> str:
    return f"{sum(1 << core for core in cores):x}"


def _cores(masks: Collection[str]) -> list[int]:
    """Return the cores that are in at least one of these masks."""
    bits = 0
    for mask in masks:
        bits |= int(mask, 16)
    return [core for core in range(bits.bit_length()) if bits >> core & 1]


def _quota() -> float | None:
    """Return the limit, in cores, that control groups set for this process; None: no limit."""
    try:
        lines = _OWN_CGROUP.read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    own = PurePosixPath(next((line[3:] for line in lines if line.startswith("0::")), "/"))
    limits = []
    for group in (own, *own.parents):
        try:
            file = _CGROUPS / group.relative_to("/") / "cpu.max"
            limit, period = file.read_text(encoding="ascii").split()
            limits.append(int(limit) / int(period))
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
    return min(limits, default=None)


@dataclass(frozen=True, kw_only=True)
class HostServers:
    """Server processes of a host. Each server uses all NICs, with threads on the NUMA nodes of the
    NICs."""

    count: int
    io_threads: int
    """Threads per server that move bytes over TCP. Most of them run on the NUMA node of a NIC."""
    adding_threads: int
    """Threads per server that add."""
    cores: Sequence[int]
    """Cores on which the servers run: those on the NICs' NUMA nodes, if the job may use enough of
    them."""
    cores_in_all: int
    """Number of cores that the job may use at a time."""

    @classmethod
    def fit(cls, ranks: Sequence[Means], count: int) -> HostServers:
        """Return servers with as many threads as the NICs' rate needs, at most half of the cores
        that ranks leave free.

        Args:
            ranks: report of each rank of the host.
            count: number of server processes.
        """
        means = ranks[0]
        cores = _cores([report["cores"] for report in ranks])
        in_all = max(1, min(len(cores), math.floor(means["quota"] or len(cores))))
        rate = (means["gbps"] or UNKNOWN_GBPS) * GBPS
        moving = max(math.ceil(2 * rate / TCP_CORE_RATE), means["nodes"])
        # Adding 4-bit values takes the most cores.
        adding = max(math.ceil(rate / FEW_BITS["int4"] / BLOCK_VALUES_PER_CORE), LEAST_ADDING)
        room = math.ceil(max(1, in_all - len(ranks)) / 2)
        moving = max(1, min(moving, round(moving * room / (moving + adding))))
        adding = max(1, min(adding, room - moving))
        moving, adding = (math.ceil(threads / count) for threads in (moving, adding))
        moving = _given("BYTEPS_IO_THREADS") or min(moving, MOST_IO)
        adding = _given("BYTEPS_SERVER_ENGINE_THREAD") or min(adding, MOST_ADDING)
        near = [core for core in _cores([means["near"]]) if core in cores]
        return cls(
            count=count,
            io_threads=moving,
            adding_threads=adding,
            cores=near if len(near) >= count * (moving + adding) else cores,
            cores_in_all=in_all,
        )

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of each server."""
        return {
            "BYTEPS_IO_THREADS": str(self.io_threads),
            "BYTEPS_SERVER_ENGINE_THREAD": str(self.adding_threads),
        }

    @property
    def busy_cores(self) -> int:
        """Number of cores that the servers can use at a time."""
        return min(self.cores_in_all, self.count * (self.io_threads + self.adding_threads))


def fit_hosts(hosts: Sequence[Sequence[Means]]) -> list[HostServers]:
    """Return the servers of each host. `hosts`: for each host, the reports of its ranks.

    All servers reduce the same number of bytes. So a host with faster NICs gets more servers, and
    its bytes are in proportion to its rate.
    """
    counts = _counts([ranks[0]["gbps"] for ranks in hosts])
    return [
        HostServers.fit(ranks, ranks[0]["servers"] or count)
        for ranks, count in zip(hosts, counts, strict=True)
    ]


def _counts(gbps: Sequence[float]) -> list[int]:
    """Return the fewest servers per host that are in proportion to these rates; one per host if a
    rate is unknown."""
    if not all(gbps):
        return [1] * len(gbps)
    parts = [rate / min(gbps) for rate in gbps]
    tried: list[tuple[float, list[int]]] = []
    for least in (1, 2, 3):
        counts = [min(MOST_SERVERS, round(least * part)) for part in parts]
        shares = zip(counts, parts, strict=True)
        tried.append((max(abs(n / (least * part) - 1) for n, part in shares), counts))
        if tried[-1][0] <= CLOSE:
            break
    return min(tried)[1]


def cost_text(hosts: Sequence[HostServers]) -> str:
    """Describe the cores and the memory that these servers take from their hosts."""
    lowest, highest = (pick(hosts, key=lambda servers: servers.busy_cores) for pick in (min, max))
    cores = f"{lowest.busy_cores} of {lowest.cores_in_all}"
    if lowest.busy_cores != highest.busy_cores:
        cores += f" to {highest.busy_cores} of {highest.cores_in_all}"
    count = max(servers.count for servers in hosts)
    memory = count * (POOL_BYTES + BASE_BYTES) / GIB
    return (
        f"on each host they take at most {cores} cores while gradients travel, and up to "
        f"{memory:.3g} GiB and 3 (int8: 5, int4: 13) times the bytes that are pushed to them"
    )
