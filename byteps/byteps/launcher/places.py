"""Rank of a process in the job, and its place among the ranks of its host.

A launcher sets both in the environment. Without a launcher, rank and size are those of
torch.distributed, and the ranks exchange the names of their hosts to find their local ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_OURS = ("BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE")


def place_settings(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """Return a rank's place as variables, which override the environment."""
    ranks = dict.fromkeys(("LOCAL_RANK", "BYTEPS_LOCAL_RANK"), local_rank)
    sizes = dict.fromkeys(("LOCAL_WORLD_SIZE", "BYTEPS_LOCAL_SIZE"), local_size)
    numbers = {"RANK": rank, "WORLD_SIZE": size, **ranks, **sizes}
    return {name: str(number) for name, number in numbers.items()}


def byteps_error(text: str) -> RuntimeError:
    """Return a BytePSError. Its class is imported here, because this module must also load without
    the engine."""
    from byteps.torch import BytePSError

    return BytePSError(text)


def setting[T: (bool, float, int, str)](
    name: str, kind: type[T], given: Mapping[str, str] | None = None
) -> T:
    """Do the same as `byteps.torch.figures.setting`. This module must also load without the
    engine."""
    from byteps.torch import figures

    return figures.setting(name, kind, given)


def host_name() -> str:
    """Return a name that identifies this host: BYTEPS_HOST_ID, or the host name and the kernel's
    boot id.

    Ranks with the same name are assumed to share a NIC, and to reach each other without it.
    """
    if given := setting("BYTEPS_HOST_ID", str):
        return given
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    # platform.node() would return a cached value, which a forked process has from its parent.
    return f"{os.uname().nodename} {boot}".strip()


@dataclass(frozen=True, kw_only=True)
class LocalPlace:
    """Message of a rank about its place on its host."""

    host: str
    local: tuple[int, int] | None
    """Local rank and size, if the launcher has set both."""
    is_named: bool
    """Whether BYTEPS_LOCAL_RANK or BYTEPS_LOCAL_SIZE is set. Their values are never replaced."""

    @classmethod
    def own(cls, env: Mapping[str, str], host: str) -> LocalPlace:
        """Return this process's message. The caller has validated the variables."""
        named = any(name in env for name in _OURS)
        rank, size = (_first_of(env, name, named) for name in ("LOCAL_RANK", "LOCAL_SIZE"))
        local = (rank, size) if rank is not None and size is not None and rank < size else None
        return cls(host=host, local=local, is_named=named)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> LocalPlace:
        """Return the message of a rank, from its JSON form."""
        local = None if facts["local"] is None else (int(facts["local"][0]), int(facts["local"][1]))
        return cls(host=facts["host"], local=local, is_named=facts["is_named"])


def _first_of(env: Mapping[str, str], name: str, named: bool) -> int | None:
    ours = env.get(f"BYTEPS_{name}") if named else None
    number = ours or env.get(name.replace("SIZE", "WORLD_SIZE"))
    return int(number) if number else None


def find_locals(places: Sequence[LocalPlace]) -> list[tuple[int, int]]:
    """Return the local rank and the local size of each rank.

    The launcher's values are kept if all ranks have them, and no two ranks of a host have the same.
    Otherwise the ranks with the same host name are counted, as without a launcher. Ray's launchers
    need this, too: they tell each rank that it is alone on its host. With wrong values, ports of
    metrics would collide, and each rank would claim all cores and NICs of its host.
    """
    local_ranks = [(rank.host, rank.local) for rank in places]
    trusts_launcher = any(rank.is_named for rank in places) or (
        all(rank.local for rank in places) and len(set(local_ranks)) == len(local_ranks)
    )
    hosts = [rank.host for rank in places]
    return [
        own.local
        if trusts_launcher and own.local
        else (hosts[:rank].count(own.host), hosts.count(own.host))
        for rank, own in enumerate(places)
    ]
