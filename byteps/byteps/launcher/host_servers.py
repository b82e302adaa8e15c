"""The servers that a host of a job in embedded mode starts, and what it has for them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from byteps.cost_model import TCP_CORE_RATE
from byteps.forecast.machines import BLOCK_VALUES_PER_CORE, GBPS
from byteps.forecast.needs import BASE_BYTES, GIB, POOL_BYTES
from byteps.forecast.training import FEW_BITS
from byteps.launcher.places import setting

UNKNOWN_GBPS = 40.0
"""Rate to be ready for where the kernel tells none, as with BYTEPS_CONNECTIONS."""
LEAST_ADDING = 4
MOST_IO, MOST_ADDING = 64, 256
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""CPU time that this process's container may use."""


def means_of_host(address: str) -> dict[str, Any]:
    """Resources that this host has for servers, as its ranks tell rank 0.

    A rank that its launcher has bound to some cores tells these alone; together they tell all.

    Args:
        address: of this host, which servers take; empty: not known.
    """
    from byteps.torch import c_lib

    mbps, nodes = c_lib.nics_of_server(address)
    return {
        "cores": f"{sum(1 << core for core in os.sched_getaffinity(0)):x}",
        "quota": _quota(),
        "gbps": mbps / 1000,
        "nodes": nodes,
    }


def _quota() -> float | None:
    try:
        limit, period = _QUOTA.read_text(encoding="ascii").split()
        return int(limit) / int(period)
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return None


@dataclass(frozen=True, kw_only=True)
class HostServers:
    """Server processes of a host. One uses all NICs, with threads on the NUMA nodes of these."""

    count: int
    io_threads: int
    """Threads of each that move bytes over TCP, most of them next to a NIC."""
    adding_threads: int
    """Threads of each that add."""
    cores: Sequence[int]
    """Cores of the host that the job may use."""
    cores_in_all: int
    """Number of cores that may be used at a time."""

    @classmethod
    def fit(cls, means: Sequence[Mapping[str, Any]], count: int) -> HostServers:
        """Returns as many threads as the NICs' rate needs, in half of the cores that ranks leave.

        Args:
            means: what each rank of the host has told.
            count: processes.
        """
        mask, quota = 0, means[0]["quota"]
        for one in means:
            mask |= int(one["cores"], 16)
        cores = [core for core in range(mask.bit_length()) if mask >> core & 1]
        in_all = max(1, min(len(cores), math.floor(quota) if quota else len(cores)))
        rate = (means[0]["gbps"] or UNKNOWN_GBPS) * GBPS
        moving = max(math.ceil(2 * rate / TCP_CORE_RATE), means[0]["nodes"])
        # Values in four bits take the most cores.
        adding = max(math.ceil(rate / FEW_BITS["int4"] / BLOCK_VALUES_PER_CORE), LEAST_ADDING)
        room = math.ceil(max(1, in_all - len(means)) / 2)
        moving = max(1, min(moving, round(moving * room / (moving + adding))))
        adding = max(1, min(adding, room - moving))
        moving, adding = (math.ceil(one / count) for one in (moving, adding))
        return cls(
            count=count,
            io_threads=_given("BYTEPS_IO_THREADS") or min(moving, MOST_IO),
            adding_threads=_given("BYTEPS_SERVER_ENGINE_THREAD") or min(adding, MOST_ADDING),
            cores=cores,
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


def _given(name: str) -> int:
    """Number that the environment gives; 0: none."""
    return setting(name, int) if name in os.environ else 0


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
