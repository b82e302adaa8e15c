"""Replicas that are lost and come back, as a worker of one of them sees it.

The scheduler removes a replica when one of its workers is lost: sums go on without it. A replica
that comes back joins between two steps: the others choose it by a small sum, so that all choose
alike, and one of them gives it what it lacks (:func:`give_tensors`).
"""

from __future__ import annotations

import io
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from byteps.torch import c_lib, ops, session
from byteps.torch.operations import Group, ranks_of
from byteps.torch.session import BytePSError

_PRIME = (1 << 31) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By bytes, the type in which a number's bits are read; longer numbers are read in halves."""


def digest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Two whole numbers below 2**31, in fp64, that change with any single number, and if two
    numbers of different size change places."""
    plain = weighted = 0
    for place, tensor in enumerate(tensors):
        flat = tensor.detach().contiguous().view(-1)
        words = flat.view(_BITS[min(4, flat.element_size())]).to(torch.int64)
        weights = torch.arange(len(words), device=words.device) % 8191 + 1
        plain += int(words.sum())
        weighted += int((words * weights).sum()) * (place + 1)
    return torch.tensor([plain % _PRIME, weighted % _PRIME], dtype=torch.float64)


def are_alike(tensors: Sequence[torch.Tensor], name: str, group: Group = None) -> bool:
    """Whether all members have the same tensors: the same answer on each of them.

    Every member calls this with the same `name`.

    Raises:
        BytePSError: a member or a server was lost.
    """
    members, mine = len(ranks_of(group)) or session.size(), digest(tensors)
    total = mine.clone()
    ops.push_pull_inplace(total, average=False, name=f"{name}/digest", group=group)
    differ = (total != mine * members).any().to(torch.float64).view(1)
    ops.push_pull_inplace(differ, average=False, name=f"{name}/differ", group=group)
    return not differ.item()


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
    donors: tuple[int, ...]
    """Which other one gives each what it lacks; -1: it was there from the beginning, or has not
    joined yet."""
    news: str
    """What has changed, in words; may be empty."""

    def donor(self, joiner: int) -> int:
        """The replica that gives this one, which has joined, what it lacks. The scheduler has
        chosen it, so all choose alike, also if it was removed since.

        Raises:
            BytePSError: there is none.
        """
        if self.donors[joiner] < 0:
            raise BytePSError("no other replica is in the job, so none can be joined")
        return self.donors[joiner]


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
    epoch, present, waiting, lives, donors, news = c_lib.replicas()
    if not present:
        count = session.replicas()
        return View(
            epoch=0,
            present=(True,) * count,
            waiting=(False,) * count,
            lives=(0,) * count,
            donors=(-1,) * count,
            news="",
        )
    return View(
        epoch=epoch,
        present=tuple(bit == "1" for bit in present),
        waiting=tuple(bit == "1" for bit in waiting),
        lives=tuple(lives),
        donors=tuple(donors),
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
    """Tensors whose next push of this worker others wait for: as many replicas as
    the quorum of `init` have made theirs. Empty where there is none."""
    return set(c_lib.awaited())


def take_missing() -> set[int]:
    """Replicas that sums of this worker have lacked, since this was called last."""
    size = session.size() // session.replicas()
    return {rank // size for rank in c_lib.take_missing()}


def rounds() -> dict[str, tuple[int, int]]:
    """Counts of releases of each name by this worker, and of the sums that it has begun since; for
    one that joins."""
    return dict(c_lib.rounds())


def set_rounds(begun: dict[str, tuple[int, int]]) -> None:
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


# One worker gives another one its state. Both call with tensors of the same sizes, and servers add
# what the giver has to the zeros of the taker. Whole numbers are added, so that every bit arrives.


CHUNK_BYTES = 16 << 20
"""So much is in flight at a time."""
_MAGIC = 0x42595045


def give_facts(facts: dict[str, Any], *, to: int, rank: int, name: str) -> None:
    """Give a dictionary of numbers, texts, tensors, lists and dictionaries.

    Args:
        facts: what :func:`torch.load` takes with ``weights_only``.
        to: the rank that calls :func:`take_facts`.
        rank: this one.
        name: the same on both, and another one for each exchange.
    """
    buffer = io.BytesIO()
    torch.save(facts, buffer)
    blob = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    head = torch.tensor([_MAGIC, len(blob), _digest(blob)], dtype=torch.int64)
    _add(head, f"{name}/head", (rank, to))
    _add(_padded(blob), f"{name}/facts", (rank, to))


def take_facts(*, giver: int, rank: int, name: str) -> dict[str, Any]:
    """What :func:`give_facts` gives.

    Raises:
        BytePSError: the giver was lost.
    """
    head = torch.zeros(3, dtype=torch.int64)
    _add(head, f"{name}/head", (rank, giver))
    magic, size, digest = head.tolist()
    if magic != _MAGIC:
        raise BytePSError(_lost(giver))
    padded = _padded(torch.zeros(size, dtype=torch.uint8))
    _add(padded, f"{name}/facts", (rank, giver))
    blob = padded.view(torch.uint8)[:size]
    if _digest(blob) != digest:
        raise BytePSError(_lost(giver))
    facts: dict[str, Any] = torch.load(io.BytesIO(blob.numpy().tobytes()), weights_only=True)
    return facts


def give_tensors(tensors: Sequence[torch.Tensor], *, to: int, rank: int, name: str) -> None:
    """Give the values of tensors, of any types and devices."""
    _exchange(tensors, (rank, to), name, gives=True)


def take_tensors(tensors: Sequence[torch.Tensor], *, giver: int, rank: int, name: str) -> None:
    """Get the values of tensors, in place.

    Raises:
        BytePSError: the giver was lost; then they have no values of any meaning.
    """
    if not _exchange(tensors, (rank, giver), name, gives=False):
        raise BytePSError(_lost(giver))


def _lost(giver: int) -> str:
    return f"worker {giver}, which gave this one its state, was lost before it had given all"


@torch.no_grad()
def _exchange(
    tensors: Sequence[torch.Tensor], pair: tuple[int, int], name: str, *, gives: bool
) -> bool:
    """Whether the digest of all values is the giver's."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    chunk = torch.empty(min(CHUNK_BYTES, -(-total // 4) * 4) // 4, dtype=torch.int32)
    digest = 0
    for pieces in _chunks(tensors, chunk.nbytes):
        chunk.zero_()
        raw = chunk.view(torch.uint8)
        if gives:
            for offset, piece in pieces:
                raw[offset : offset + len(piece)].copy_(piece)
            digest = _digest(raw, digest)
        _add(chunk, f"{name}/tensors", pair)
        if not gives:
            digest = _digest(raw, digest)
            for offset, piece in pieces:
                piece.copy_(raw[offset : offset + len(piece)])
    end = torch.tensor([_MAGIC, digest] if gives else [0, 0], dtype=torch.int64)
    _add(end, f"{name}/end", pair)
    return end.tolist() == [_MAGIC, digest]


def _chunks(tensors: Sequence[torch.Tensor], size: int) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Bytes of the tensors, end to end, cut into chunks: (place in the chunk, some of them)."""
    pieces: list[tuple[int, torch.Tensor]] = []
    filled = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        flat = tensor.detach().view(-1).view(torch.uint8)
        while len(flat):
            part = flat[: size - filled]
            pieces.append((filled, part))
            filled += len(part)
            flat = flat[len(part) :]
            if filled == size:
                yield pieces
                pieces, filled = [], 0
    if pieces:
        yield pieces


def _add(values: torch.Tensor, name: str, pair: tuple[int, int]) -> None:
    ops.push_pull_inplace(values, average=False, name=name, group=tuple(sorted(pair)))


def _padded(blob: torch.Tensor) -> torch.Tensor:
    """As int32, with zeros behind."""
    padded = torch.zeros(-(-len(blob) // 4), dtype=torch.int32)
    padded.view(torch.uint8)[: len(blob)].copy_(blob)
    return padded


def _digest(values: torch.Tensor, before: int = 0) -> int:
    """A whole number below 2**32, of bytes in host memory, and of those before them."""
    return zlib.crc32(memoryview(values.numpy()), before)
