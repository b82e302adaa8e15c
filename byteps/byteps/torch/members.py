"""Replicas that are lost and come back, as a worker of one of them sees it.

The scheduler removes a replica when one of its workers is lost: sums go on without it. A replica
that comes back joins between two steps: the others choose it by a small sum, so that all choose
alike, and one of them gives it what it lacks (:mod:`byteps.torch.state_transfer`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from byteps.torch import c_lib, ops, session
from byteps.torch.ranks import Group
from byteps.torch.session import BytePSError

_LOOK_EVERY_S = 0.002


@dataclass(frozen=True, kw_only=True)
class View:
    """The replicas, by number, as the scheduler has told last."""

    epoch: int
    """Grows with each change."""
    present: tuple[bool, ...]
    """Which take part in sums."""
    waiting: tuple[bool, ...]
    """Which are ready to join."""
    lives: tuple[int, ...]
    """The epoch in which each became ready to join; 0: it was there from the beginning."""
    news: str
    """What has changed, in words; may be empty."""

    def donor(self, joiner: int) -> int:
        """The replica that gives this one what it lacks.

        Raises:
            BytePSError: there is none.
        """
        for replica, present in enumerate(self.present):
            if present and replica != joiner:
                return replica
        raise BytePSError("no other replica is in the job, so none can be joined")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the replicas have found by one sum, the same on all of them."""

    joiner: int
    """The replica that joins now; -1: none."""
    life: int
    """Of that replica."""
    present: tuple[bool, ...]
    """Which replicas the sum was made of."""
    leaving: tuple[bool, ...]
    """Which of them leave now. Nobody joins then."""


def view() -> View:
    """What the scheduler has told last; all are present where it has told nothing."""
    epoch, present, waiting, lives, news = c_lib.replicas()
    if not present:
        count = session.replicas()
        return View(
            epoch=0,
            present=(True,) * count,
            waiting=(False,) * count,
            lives=(0,) * count,
            news="",
        )
    return View(
        epoch=epoch,
        present=tuple(bit == "1" for bit in present),
        waiting=tuple(bit == "1" for bit in waiting),
        lives=tuple(lives),
        news=news,
    )


def is_late() -> bool:
    """Whether this worker's replica has come to a job that runs, and has to join it."""
    return bool(c_lib.is_initialized() and c_lib.is_late())


def is_removed() -> bool:
    """Whether the job goes on without this worker, or has failed, or this worker has left it."""
    try:
        c_lib.check()
    except BytePSError:
        return True
    return False


def awaited() -> set[str]:
    """Tensors whose next push of this worker others wait for: BYTEPS_QUORUM replicas have made
    theirs. Empty where that is not set."""
    return set(c_lib.awaited())


def take_missing() -> set[int]:
    """Replicas that sums of this worker have lacked, since this was called last."""
    size = session.size() // session.replicas()
    return {rank // size for rank in c_lib.take_missing()}


def rounds() -> dict[str, int]:
    """How many sums of each tensor this worker has begun, to be given to one that joins."""
    return dict(c_lib.rounds())


def set_rounds(begun: dict[str, int]) -> None:
    """Go on where another worker of this place is, which told its `rounds` between two steps."""
    c_lib.set_rounds(begun)


def choose(name: str, group: Group, *, leaves: bool = False) -> Choice:
    """Choose a replica to join, between two steps. One worker of each replica calls this.

    A replica that leaves says so here, so that the others know it at the same step. Then its
    workers end what they have in flight, and leave by :func:`byteps.torch.session.leave`.

    A replica is chosen when every member of `group` sees the same life of it wait. Replicas that
    sums before this one have lacked are to be taken by :func:`take_missing` first.

    Args:
        name: of the sum, the same on all members.
        group: the ranks that call.
        leaves: whether this replica does.

    Raises:
        BytePSError: this replica was removed, or a server was lost.
    """
    count, now = session.replicas(), view()
    mine = torch.zeros(3 * count, dtype=torch.float64)
    mine[2 * count + session.replica()] = leaves
    for replica, waits in enumerate(now.waiting):
        if waits:
            mine[replica] = now.lives[replica]
            mine[count + replica] = now.lives[replica] ** 2
    total = mine.clone()
    ops.push_pull_inplace(total, average=False, name=name, group=group)
    lacking = take_missing()
    # The mean and the mean of the squares are this one's own: then they are everybody's.
    agreed = total == mine * count
    present = tuple(replica not in lacking for replica in range(count))
    leaving = tuple(wish > 0 for wish in total[2 * count :].tolist())
    joiner = -1
    for replica in range(count) if not any(leaving) else ():
        if mine[replica] and agreed[replica] and agreed[count + replica]:
            joiner = replica
            break
    life = int(mine[joiner]) if joiner >= 0 else 0
    return Choice(joiner=joiner, life=life, present=present, leaving=leaving)


def admit(joiner: int, life: int, *, asks: bool) -> View | None:
    """Have the scheduler admit a replica that waits. All workers of all replicas that are present
    call this, and none begins a sum before all have finished theirs.

    Args:
        joiner: the replica, as :func:`choose` has found it.
        life: likewise.
        asks: whether this worker asks the scheduler; the others wait. One of each replica does.

    Returns:
        the replicas with it, or None: it was lost meanwhile.

    Raises:
        BytePSError: this replica was removed, or a server was lost.
    """
    if asks:
        c_lib.ask_to_admit(joiner, life)
    now = _await(
        lambda seen: seen.epoch >= life and (seen.lives[joiner] != life or not seen.waiting[joiner])
    )
    return now if now.present[joiner] and now.lives[joiner] == life else None


def join() -> View:
    """Say that this worker of a late replica is ready, and wait until its replica is admitted. All
    of its workers call this.

    Returns:
        the replicas, with this one.

    Raises:
        BytePSError: the job has ended, this replica was removed, or a server was lost.
    """
    c_lib.say_ready()
    mine = session.replica()
    # Until the scheduler has told something, all seem to be present.
    return _await(lambda seen: seen.present[mine] and seen.lives[mine] > 0)


def _await(condition: Callable[[View], bool]) -> View:
    while not condition(now := view()):
        c_lib.check()
        time.sleep(_LOOK_EVERY_S)
    return now
