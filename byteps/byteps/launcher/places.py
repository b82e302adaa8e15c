"""Where a process stands: its rank in the job, and its place among the ranks of its host.

A launcher says both by the environment. Where there is none, torch.distributed knows rank and size,
and the ranks find their places by telling each other their hosts.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOST_RANKS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Where this process stands in the job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def numbers(self) -> tuple[int, int, int, int]:
        """All four, as the C library takes them."""
        return self.rank, self.world_size, self.local_rank, self.local_world_size


def byteps_error(text: str) -> RuntimeError:
    """The package's own error where it is importable: this module also loads without the engine."""
    try:
        from byteps.torch import BytePSError
    except ImportError:
        return RuntimeError(text)
    return BytePSError(text)


def integer(env: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    """A variable's whole number, None where it is not set. Raises BytePSError outside low..high."""
    text = env.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
        raise byteps_error(f"{name}={text!r} is not a whole number from {low} to {high}")
    return int(text)


def seconds(env: Mapping[str, str], name: str, default: float) -> float:
    """A variable's seconds. Raises BytePSError where they are not positive."""
    text = env.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e9:
        raise byteps_error(f"{name}={text!r} is not a positive number of seconds")
    return value


def read_ranks(env: Mapping[str, str]) -> tuple[int, int]:
    """Rank and size from RANK and WORLD_SIZE, as launchers set them.

    DMLC_WORKER_ID and DMLC_NUM_WORKER stand in for them. A process with none of these is the only
    one of its job. Raises BytePSError for a value that cannot be, or a partial set.
    """
    world = integer(env, "WORLD_SIZE", 1, _MOST_RANKS)
    dmlc_world = integer(env, "DMLC_NUM_WORKER", 1, _MOST_RANKS)
    if world is not None and dmlc_world is not None and world != dmlc_world:
        raise byteps_error(
            f"WORLD_SIZE={world} and DMLC_NUM_WORKER={dmlc_world} disagree: workers are the job's "
            "ranks, not its hosts; unset DMLC_NUM_WORKER"
        )
    size = world if world is not None else dmlc_world
    if size is None or size == 1:
        return 0, 1
    rank = integer(env, "RANK", 0, size - 1)
    if rank is None:
        rank = integer(env, "DMLC_WORKER_ID", 0, size - 1)
    if rank is None:
        raise byteps_error(
            f"a job of {size} workers (WORLD_SIZE, DMLC_NUM_WORKER) needs RANK: start it with "
            "torchrun, or call torch.distributed.init_process_group() with rank= and world_size= "
            "before bps.init()"
        )
    return rank, size


def host_name(given: str) -> str:
    """What tells this host from others: `given` (BYTEPS_HOST_ID), or the host name and the kernel's
    boot id.

    Ranks with the same name are taken to share a NIC and to reach each other without it.
    """
    if given:
        return given
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot}".strip()


_OURS = ("BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE")
_found: tuple[str | None, ...] = (None, None)
"""What `keep` set of them."""


@dataclass(frozen=True, kw_only=True)
class LocalPlace:
    """Message of a rank about its place on its host."""

    host: str
    local: tuple[int, int] | None
    """Local rank and size, if the launcher said both."""
    is_named: bool
    """BYTEPS_LOCAL_RANK or BYTEPS_LOCAL_SIZE say it: what they name is kept."""

    @classmethod
    def own(cls, env: Mapping[str, str], host: str) -> LocalPlace:
        """This process's. Raises BytePSError for a value that cannot be."""
        # What an earlier job in this process found was of other ranks.
        named = any(env.get(name) != was for name, was in zip(_OURS, _found, strict=True))
        rank, size = (_first_of(env, name, named) for name in ("LOCAL_RANK", "LOCAL_SIZE"))
        local = (rank, size) if rank is not None and size is not None and rank < size else None
        return cls(host=host, local=local, is_named=named)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> LocalPlace:
        """Reads a rank's message, as JSON."""
        local = None if told["local"] is None else (int(told["local"][0]), int(told["local"][1]))
        return cls(host=told["host"], local=local, is_named=told["is_named"])


def _first_of(env: Mapping[str, str], name: str, named: bool) -> int | None:
    ours = integer(env, f"BYTEPS_{name}", 0, _MOST_RANKS) if named else None
    theirs = integer(env, name.replace("SIZE", "WORLD_SIZE"), 0, _MOST_RANKS)
    return ours if ours is not None else theirs


def keep(local: tuple[int, int]) -> None:
    """Set the variables of this process's place to one that was found."""
    global _found
    found = tuple(map(str, local))
    os.environ.update(zip(_OURS, found, strict=True))
    _found = found


def find_locals(places: Sequence[LocalPlace]) -> list[tuple[int, int]]:
    """For each rank its number among the ranks of its host, and how many these are.

    What the launcher said is kept where it can be: it said so to all, and to no two ranks of a host
    the same. Otherwise hosts are compared: Ray's launchers tell each rank that it is alone on its
    host, and without a launcher nobody tells. Then metrics ports would collide, and each rank would
    count the host's cores and NICs for itself.
    """
    told = [(place.host, place.local) for place in places]
    kept = any(place.is_named for place in places) or (
        all(place.local for place in places) and len(set(told)) == len(told)
    )
    numbers: dict[str, int] = {}
    counted = []
    for place in places:
        numbers[place.host] = numbers.get(place.host, -1) + 1
        counted.append(numbers[place.host])
    return [
        place.local if kept and place.local else (number, numbers[place.host] + 1)
        for place, number in zip(places, counted, strict=True)
    ]
