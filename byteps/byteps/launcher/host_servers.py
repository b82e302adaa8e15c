"""The servers that each host of a job in embedded mode starts, and what it has for them."""

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
"""Rate to be ready for where the kernel tells none, as with BYTEPS_CONNECTIONS."""
LEAST_ADDING = 4
MOST_IO, MOST_ADDING, MOST_SERVERS = 64, 256, 8
CLOSE = 0.1
"""Part by which a host's number of servers may miss its share of all NICs' rates."""
_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

Means = Mapping[str, Any]
"""Resources of a host as one of its ranks tells them: see `means_of_host`."""


def means_of_host(address: str) -> Means:
    """Resources that this host has for servers, as its ranks tell rank 0.

    A rank that its launcher has bound to some cores tells these alone; together they tell all.

    Args:
        address: of this host, which servers take; empty: not known.
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
    """Number that the environment gives; 0: none."""
    return setting(name, int) if name in os.environ else 0


def _mask(cores: Collection[int]) -> str:
    return f"{sum(1 << core for core in cores):x}"


def _cores(masks: Collection[str]) -> list[int]:
    """Cores that are in one of these."""
    bits = 0
    for mask in masks:
        bits |= int(mask, 16)
    return [core for core in range(bits.bit_length()) if bits >> core & 1]


def _quota() -> float | None:
    """CPU time that this process's control groups leave it; None: there is no limit."""
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
        except (OSError, ValueError):  # no such group here, or no limit ("max")
            continue
    return min(limits, default=None)


@dataclass(frozen=True, kw_only=True)
class HostServers:
    """Server processes of a host. One uses all NICs, with threads on the NUMA nodes of these."""

    count: int
    io_threads: int
    """Threads of each that move bytes over TCP, most of them next to a NIC."""
    adding_threads: int
    """Threads of each that add."""
    cores: Sequence[int]
    """Cores on which they run: on the NUMA nodes of the NICs, where the job may use enough."""
    cores_in_all: int
    """Number of cores that the job may use at a time."""

    @classmethod
    def fit(cls, ranks: Sequence[Means], count: int) -> HostServers:
        """Returns as many threads as the NICs' rate needs, in half of the cores that ranks leave.

        Args:
            ranks: what each rank of the host has told.
            count: processes.
        """
        means = ranks[0]
        cores = _cores([one["cores"] for one in ranks])
        in_all = max(1, min(len(cores), math.floor(means["quota"] or len(cores))))
        rate = (means["gbps"] or UNKNOWN_GBPS) * GBPS
        moving = max(math.ceil(2 * rate / TCP_CORE_RATE), means["nodes"])
        # Values in four bits take the most cores.
        adding = max(math.ceil(rate / FEW_BITS["int4"] / BLOCK_VALUES_PER_CORE), LEAST_ADDING)
        room = math.ceil(max(1, in_all - len(ranks)) / 2)
        moving = max(1, min(moving, round(moving * room / (moving + adding))))
        adding = max(1, min(adding, room - moving))
        moving, adding = (math.ceil(one / count) for one in (moving, adding))
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
        """Settings of each."""
        return {
            "BYTEPS_IO_THREADS": str(self.io_threads),
            "BYTEPS_SERVER_ENGINE_THREAD": str(self.adding_threads),
        }

    @property
    def busy_cores(self) -> int:
        """Cores that they can use at a time."""
        return min(self.cores_in_all, self.count * (self.io_threads + self.adding_threads))


def fit_hosts(hosts: Sequence[Sequence[Means]]) -> list[HostServers]:
    """The servers of each host, by what its ranks have told.

    Each server reduces as much as any other. So hosts whose NICs are faster start more of them, and
    bytes follow the rates.
    """
    counts = _counts([ranks[0]["gbps"] for ranks in hosts])
    return [
        HostServers.fit(ranks, ranks[0]["servers"] or count)
        for ranks, count in zip(hosts, counts, strict=True)
    ]


def _counts(gbps: Sequence[float]) -> list[int]:
    """The fewest servers of each host that are in proportion to these rates; one, if not all rates
    are known."""
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
    """Says what these servers take of their hosts."""
    lowest, highest = (pick(hosts, key=lambda one: one.busy_cores) for pick in (min, max))
    cores = f"{lowest.busy_cores} of {lowest.cores_in_all}"
    if lowest.busy_cores != highest.busy_cores:
        cores += f" to {highest.busy_cores} of {highest.cores_in_all}"
    count = max(one.count for one in hosts)
    memory = count * (POOL_BYTES + BASE_BYTES) / GIB
    return (
        f"on each host they take at most {cores} cores while gradients travel, and up to "
        f"{memory:.3g} GiB and 3 (int8: 5, int4: 13) times the bytes that are pushed to them"
    )
