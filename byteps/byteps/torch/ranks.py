"""Groups of ranks, as users name them and as the engine wants them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from byteps.torch import c_lib, session

Group = Sequence[int] | torch.distributed.ProcessGroup | None
"""Distinct global ranks, or the ProcessGroup of them; None: all workers."""


def ranks_of(group: Group) -> list[int]:
    """Its ranks, ascending; empty for all workers. Raises ValueError when it is no group."""
    if group is None:
        return []
    # What new_group() gives the ranks outside.
    outside: object = torch.distributed.GroupMember.NON_GROUP_MEMBER
    if group is outside:
        raise ValueError(f"rank {session.launched().rank} is no member of the group")
    if isinstance(group, torch.distributed.ProcessGroup):
        ranks = torch.distributed.get_process_group_ranks(group)
        first = session.first_rank()
        return sorted(first + r for r in ranks) if first else sorted(ranks)
    ranks = sorted(int(r) for r in group)
    if not ranks:
        raise ValueError("the group has no ranks")
    if len(set(ranks)) != len(ranks) or ranks[0] < 0:
        raise ValueError(f"the group must be distinct ranks, not {list(group)}")
    return ranks


class RanksCache:
    """The ranks of groups that cannot change, as the engine wants them: a push of a large group
    would otherwise take longest for these."""

    MOST = 256
    """Groups that are kept: those that were used first go first."""

    def __init__(self) -> None:
        self._all = c_lib.Ranks([])
        self._known: dict[int, tuple[Callable[[], object], c_lib.Ranks]] = {}
        """By the object's id; what returns the object for as long as it lives, and its ranks."""

    def ranks(self, group: Group) -> c_lib.Ranks:
        """Raises ValueError when it is no group."""
        if group is None:
            return self._all
        known = self._known.get(id(group))
        if known is not None and known[0]() is group:
            return known[1]
        ranks = c_lib.Ranks(ranks_of(group))
        if isinstance(group, tuple):
            self._keep(group, lambda: group, ranks)
        elif isinstance(group, torch.distributed.ProcessGroup):
            # Not kept alive: the program ends it.
            self._keep(group, weakref.ref(group), ranks)
        return ranks

    def _keep(self, group: object, get: Callable[[], object], ranks: c_lib.Ranks) -> None:
        self._known.pop(id(group), None)
        if len(self._known) >= self.MOST:
            del self._known[next(iter(self._known))]
        self._known[id(group)] = get, ranks


_cache = RanksCache()


def engine_ranks(group: Group) -> c_lib.Ranks:
    """The ranks of a group for c_lib, looked up once for each group that cannot change.

    Raises:
        ValueError: it is no group, or this rank is no member of it.
    """
    return _cache.ranks(group)
