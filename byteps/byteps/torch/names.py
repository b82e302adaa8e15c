"""The names under which objects sum their tensors, and how they are given back."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

from byteps.torch import c_lib, operations, session
from byteps.torch.operations import Group


def release(names: Sequence[str], *, group: Group | c_lib.Ranks = None) -> None:
    """Give back what servers and this worker keep for these names: sums, optimizer state, losses.

    Every member of the group calls this, each when it likes, after the same sums. A server frees a
    tensor once all members that have declared it have released it or left the job. From now on
    the name stands for a new tensor, of any type and shape: the next one that is declared under it
    meets the others that members declare after as many releases. So members may release at
    different times, but must do so equally often, also of a name that they have not used.

    Operations in flight go on: the tensor is given back when the last of them has ended. Does not
    block, raises nothing of the network's, and may be called by a finalizer; does nothing where
    this process is in no job.

    Args:
        names: as `push_pull` and `declare` have them; those of `c_lib.UpdatedTensor`, too.
        group: that they were declared with, or its `engine_ranks`.

    Raises:
        ValueError: it is no group, or this rank is no member of it.
    """
    if not names or not c_lib.is_initialized():
        return
    ranks = group if isinstance(group, c_lib.Ranks) else operations.engine_ranks(group)
    lowest = ranks.lowest()
    owners = _owners_in_job()
    for name in names:
        owners.pop((lowest, name), None)
    operations.forget(names)
    c_lib.release(list(names), lowest)


class Names:
    """The names that one object sums its tensors under, which it alone gives back.

    An object takes names before it declares or sums anything under them: when it is made, when its
    hooks meet a parameter. If an older object still has them, whose finalizer has not run or whose
    `close` nobody has called, they are released first; so an object that is made anew under the
    same names gets new tensors on all ranks, whenever garbage is collected on each. `release` then
    gives back the names that nobody has taken since: it may be called several times, in any thread,
    by a finalizer, and after the job was left.

    Example:
        self._names = Names(f"{prefix}/first", f"{prefix}/second", group=group, owner=self)
    """

    def __init__(
        self, *names: str, group: Group | c_lib.Ranks = None, owner: object = None
    ) -> None:
        """Take these names.

        Args:
            group: of all names that this object will take.
            owner: they are given back when it is collected; None: by `release` alone.

        Raises:
            BytePSError: this process is in no job.
            ValueError: it is no group, or this rank is no member of it.
        """
        session.launched()
        self._ranks = group if isinstance(group, c_lib.Ranks) else operations.engine_ranks(group)
        self._number = next(_numbers)
        self._taken: set[str] = set()
        self.take(*names)
        if owner is not None:
            weakref.finalize(owner, self.release).atexit = False

    def take(self, *names: str) -> None:
        """Take more names; nothing happens to those that this object has taken already."""
        new = [name for name in names if name not in self._taken]
        owners, lowest = _owners_in_job(), self._ranks.lowest()
        release([name for name in new if (lowest, name) in owners], group=self._ranks)
        for name in new:
            owners[lowest, name] = self._number
        self._taken.update(new)

    def release(self) -> None:
        """Give back the names that no other object has taken."""
        taken, self._taken = self._taken, set()
        if not taken or not c_lib.is_initialized():
            return
        owners, lowest = _owners_in_job(), self._ranks.lowest()
        # In the same order in each process.
        mine = sorted(name for name in taken if owners.get((lowest, name)) == self._number)
        release(mine, group=self._ranks)


_numbers = itertools.count()
_owners: dict[tuple[int, str], int] = {}
"""By lowest rank and name: the number of the `Names` that has it."""
_job: session.Launch | None = None
"""In which they have."""


def _owners_in_job() -> dict[tuple[int, str], int]:
    """Owners in this job: names of one that was left are nobody's."""
    global _job
    launch = session.launched()
    if launch is not _job:
        _owners.clear()
        _job = launch
    return _owners
