"""Identity of a process group: the same on all members, and different for each group."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Identity of a process group within torch.distributed's default group."""

    name: str
    """torch's name of the group. Groups that exist at the same time have different names."""
    ranks: tuple[int, ...]
    """Global ranks of the group, in its order."""
    predecessors: int
    """Number of earlier groups with the same name and ranks. All members count the same, because
    every member has made each of these groups."""

    def key(self, kind: str, nonce: str) -> str:
        """Return the prefix of the names of the group's tensors.

        Args:
            kind: kind of the reductions, since a group may have several kinds.
            nonce: random text that the ranks of the default group share. The name alone is not
                unique, because torch counts group names from zero in each default group.
        """
        text = repr((self.name, self.ranks, self.predecessors))
        return f"{kind}/{nonce}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class _Counts:
    """Counts the groups with the same name and ranks, within one default group of torch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._counts: Counter[tuple[str, int]] = Counter()

    def next(self, name: str, ranks: tuple[int, ...]) -> int:
        world = dist.group.WORLD  # None: the default group is being made
        with self._lock:
            if world is None or (self._world is not None and self._world() is not world):
                self._counts.clear()
            self._world = None if world is None else weakref.ref(world)
            number = self._counts[name, hash(ranks)]
            self._counts[name, hash(ranks)] += 1
        return number


_counts = _Counts()


def of_new_group(name: str, ranks: Sequence[int]) -> Identity:
    """Return the identity of a group that is being made. All members call this once per group."""
    members = tuple(ranks)
    return Identity(name=name, ranks=members, predecessors=_counts.next(name, members))


def of_group(group: dist.ProcessGroup) -> Identity:
    """Return the identity of a group of another backend. All members call this once per group."""
    return of_new_group(group.group_name, dist.get_process_group_ranks(group))
