"""Names under which objects sum their tensors. Releasing a name frees its tensor on servers and
on this worker.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

from byteps.torch import c_lib, operations, session
from byteps.torch.operations import Group


def release(names: Sequence[str], *, group: Group | c_lib.Ranks = None) -> None:
    """Release the state that servers and this worker keep for these names: sums, optimizer state,
    rounding losses.

    Every member of the group calls this, at any time after the same sums. A server frees a tensor
    when all members that have declared it have released it or left the job. From now on the name
    stands for a new tensor, of any type and shape. Members match declarations of a name by their
    number of releases. So they may release at different times but must do so equally often, even
    for a name that they have not used.

    Operations in flight go on: the tensor is released when the last of them has ended. Does not
    block, and raises no network error, so a finalizer may call it. Does nothing if this process is
    in no job.

    Args:
        names: names given to `push_pull`, `declare` or `c_lib.UpdatedTensor`.
        group: the group with which the names were declared, or the `engine_ranks` of that group.

    Raises:
        ValueError: `group` is no group, or this rank is no member of it.
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
    """Names under which an object sums its tensors. Only this object releases them.

    An object takes names before it declares or sums anything under them, for example when it is
    made. If an older object still has some of the names (it was not closed, and its finalizer has
    not run), these are released first. So a new object under the same names gets new tensors on all
    ranks, independent of garbage collection. `release` releases the names that no newer object has
    taken. Any thread and any finalizer may call it, several times, even after the job has ended.

    Example:
        self._names = Names(f"{prefix}/first", f"{prefix}/second", group=group, owner=self)
    """

    def __init__(
        self, *names: str, group: Group | c_lib.Ranks = None, owner: object = None
    ) -> None:
        """Take these names.

        Args:
            group: the group with which all names of this object are declared.
            owner: object whose garbage collection releases the names. None: only `release` releases
                them.

        Raises:
            BytePSError: this process is in no job.
            ValueError: `group` is no group, or this rank is no member of it.
        """
        session.launched()
        self._ranks = group if isinstance(group, c_lib.Ranks) else operations.engine_ranks(group)
        self._number = next(_numbers)
        self._taken: set[str] = set()
        self.take(*names)
        if owner is not None:
            weakref.finalize(owner, self.release).atexit = False

    def take(self, *names: str) -> None:
        """Take more names; names that this object has already taken are left as they are."""
        new = [name for name in names if name not in self._taken]
        owners, lowest = _owners_in_job(), self._ranks.lowest()
        release([name for name in new if (lowest, name) in owners], group=self._ranks)
        for name in new:
            owners[lowest, name] = self._number
        self._taken.update(new)

    def release(self) -> None:
        """Release the names that no newer object has taken."""
        taken, self._taken = self._taken, set()
        if not taken or not c_lib.is_initialized():
            return
        owners, lowest = _owners_in_job(), self._ranks.lowest()
        # Every process releases the names in the same order, so they are sorted.
        own_names = sorted(name for name in taken if owners.get((lowest, name)) == self._number)
        release(own_names, group=self._ranks)


_numbers = itertools.count()
_owners: dict[tuple[int, str], int] = {}
"""Number of the `Names` object that has a name. Keys: (lowest rank of the group, name)."""
_job: session.Launch | None = None
"""The job to which `_owners` belongs."""


def _owners_in_job() -> dict[tuple[int, str], int]:
    """Return the owners in this job. Owners from an earlier job are dropped."""
    global _job
    launch = session.launched()
    if launch is not _job:
        _owners.clear()
        _job = launch
    return _owners
