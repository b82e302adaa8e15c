"""Identity of a process group: the same on all members, and no other group's."""

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
    """A process group, as torch.distributed's default group knows it."""

    name: str
    """torch's: no two groups that live at the same time share one."""
    ranks: tuple[int, ...]
    """Global ranks of the group, in its order."""
    life: int
    """Groups of this name and these ranks that there were before. All members make each of them, so
    all count alike, whatever else a rank makes or destroys meanwhile."""

    def key(self, kind: str, nonce: str) -> str:
        """Get the prefix of the names of the group's tensors.

        Args:
            kind: Kind of the reductions, if a group has several.
            nonce: Value that the ranks of the default group have agreed on. torch counts names
                from zero in each default group.
        """
        text = repr((self.name, self.ranks, self.life))
        return f"{kind}/{nonce}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class _Lives:
    """Counts groups of one name and the same ranks, within one default group of torch's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._counts: Counter[tuple[str, int]] = Counter()

    def next(self, name: str, ranks: tuple[int, ...]) -> int:
        world = dist.group.WORLD  # None: it is being made
        with self._lock:
            if world is None or (self._world is not None and self._world() is not world):
                self._counts.clear()
            self._world = None if world is None else weakref.ref(world)
            number = self._counts[name, hash(ranks)]
            self._counts[name, hash(ranks)] += 1
        return number


_lives = _Lives()


def of_new_group(name: str, ranks: Sequence[int]) -> Identity:
    """The identity of a group that is being made. All members call this once for it."""
    members = tuple(ranks)
    return Identity(name=name, ranks=members, life=_lives.next(name, members))


def of_group(group: dist.ProcessGroup) -> Identity:
    """The identity of a group that is none of BytePS. To be called once for it, by all members."""
    return of_new_group(group.group_name, dist.get_process_group_ranks(group))
