"""Hosts: what tells them apart, and which ranks of a group share one."""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from byteps.torch.figures import setting

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """What tells this host from others: BYTEPS_HOST_ID, or the host name and the kernel's boot id.

    Ranks with the same name are taken to share a NIC and to reach each other without it.
    """
    given = setting("BYTEPS_HOST_ID")
    if given:
        return given
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot}".strip()


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
