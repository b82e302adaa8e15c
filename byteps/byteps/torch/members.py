"""Membership of replicas that leave, are lost and come back, as a worker sees it.

The scheduler removes a replica when one of its workers is lost, and sums go on without the replica.
A replica that comes back joins between two steps. The other replicas agree on it by a small sum,
and one of them sends it the state (:func:`give_tensors`).
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
"""Integer type for reading a number's bits, by element size in bytes. Longer numbers are read as
several 32-bit words."""


def digest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return two integers below 2**31, in fp64, computed from all numbers of the tensors. The
    integers change if one number changes, or if two different numbers change places."""
    plain = weighted = 0
    for index, tensor in enumerate(tensors):
        flat = tensor.detach().contiguous().view(-1)
        words = flat.view(_BITS[min(4, flat.element_size())]).to(torch.int64)
        weights = torch.arange(len(words), device=words.device) % 8191 + 1
        plain += int(words.sum())
        weighted += int((words * weights).sum()) * (index + 1)
    return torch.tensor([plain % _PRIME, weighted % _PRIME], dtype=torch.float64)


def are_alike(tensors: Sequence[torch.Tensor], name: str, group: Group = None) -> bool:
    """Return whether all members have the same tensors; all members get the same answer.

    Every member calls this with the same `name`.

    Raises:
        BytePSError: a member or a server was lost.
    """
    members, own = len(ranks_of(group)) or session.size(), digest(tensors)
    total = own.clone()
    ops.push_pull_inplace(total, average=False, name=f"{name}/digest", group=group)
    differ = (total != own * members).any().to(torch.float64).view(1)
    ops.push_pull_inplace(differ, average=False, name=f"{name}/differ", group=group)
    return not differ.item()


_LOOK_EVERY_S = 0.002


@dataclass(frozen=True, kw_only=True)
class View:
    """The scheduler's last report about the replicas. Tuples are indexed by replica."""

    epoch: int
    """Increases with each change."""
    present: tuple[bool, ...]
    """Replicas that take part in sums."""
    waiting: tuple[bool, ...]
    """Replicas that are ready to join."""
    ready_epochs: tuple[int, ...]
    """Epoch in which each replica became ready to join; 0: it was present from the beginning."""
    donors: tuple[int, ...]
    """Donor of each replica: the replica that has sent it the state. -1: the replica was present
    from the beginning, or has not joined yet."""
    news: str
    """Description of the last change; may be empty."""

    def donor(self, joiner: int) -> int:
        """Return the replica that sends the state to `joiner`. The scheduler has chosen it, so all
        members know the same donor, even if the donor was removed meanwhile.

        Raises:
            BytePSError: no donor was available.
        """
        if self.donors[joiner] < 0:
            raise BytePSError("no other replica is in the job, so none can be joined")
        return self.donors[joiner]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Result of `choose`, the same on all replicas."""

    joiner: int
    """Replica that joins now; -1: none."""
    ready_epoch: int
    """Epoch in which the joining replica became ready to join."""
    present: tuple[bool, ...]
    """Replicas that took part in the sum."""
    leaving: tuple[bool, ...]
    """Replicas that leave now. In a step in which one leaves, none joins."""


def view() -> View:
    """Return the scheduler's last report. Before the first report all replicas count as present."""
    epoch, present, waiting, ready_epochs, donors, news = c_lib.replicas()
    if not present:
        count = session.replicas()
        return View(
            epoch=0,
            present=(True,) * count,
            waiting=(False,) * count,
            ready_epochs=(0,) * count,
            donors=(-1,) * count,
            news="",
        )
    return View(
        epoch=epoch,
        present=tuple(bit == "1" for bit in present),
        waiting=tuple(bit == "1" for bit in waiting),
        ready_epochs=tuple(ready_epochs),
        donors=tuple(donors),
        news=news,
    )


def is_late() -> bool:
    """Return whether this worker's replica came when the job was running, and still has to join
    it."""
    return bool(c_lib.is_initialized() and c_lib.is_late())


def is_removed() -> bool:
    """Return whether this worker was removed, has left, or its job has failed."""
    try:
        c_lib.check()
    except BytePSError:
        return True
    return False


def awaited() -> set[str]:
    """Return the names of tensors whose next push by this worker is awaited: a quorum of replicas
    (see `init`) have made that push. Empty without a quorum."""
    return set(c_lib.awaited())


def take_missing() -> set[int]:
    """Return the replicas that a sum of this worker has lacked since the last call."""
    size = session.size() // session.replicas()
    return {rank // size for rank in c_lib.take_missing()}


def rounds() -> dict[str, tuple[int, int]]:
    """Return, for each name, how often this worker has released the name, and how many sums it has
    begun since the last release. A joining worker needs these counts."""
    return dict(c_lib.rounds())


def set_rounds(begun: dict[str, tuple[int, int]]) -> None:
    """Go on with the `rounds` of the worker of the same local rank in another replica."""
    c_lib.set_rounds(begun)


def choose(name: str, group: Group, *, leaves: bool = False) -> Choice:
    """Choose a replica to join, between two steps. One worker of each replica calls this.

    A replica that leaves announces it here, so that all others learn it at the same step. Its
    workers then finish their operations and call :func:`byteps.torch.session.leave`.

    A replica is chosen when every member of `group` has seen it waiting since the same epoch. Call
    :func:`take_missing` first, to clear replicas that earlier sums have lacked.

    Args:
        name: name of the sum, the same on all members.
        group: the ranks that call this.
        leaves: whether this replica leaves.

    Raises:
        BytePSError: this replica was removed, or a server was lost.
    """
    count, now = session.replicas(), view()
    own = torch.zeros(3 * count, dtype=torch.float64)
    own[2 * count + session.replica()] = leaves
    for replica, waits in enumerate(now.waiting):
        if waits:
            own[replica] = now.ready_epochs[replica]
            own[count + replica] = now.ready_epochs[replica] ** 2
    total = own.clone()
    ops.push_pull_inplace(total, average=False, name=name, group=group)
    lacking = take_missing()
    # If mean and mean square equal this member's own, all members have the same values.
    agreed = total == own * count
    present = tuple(replica not in lacking for replica in range(count))
    leaving = tuple(wish > 0 for wish in total[2 * count :].tolist())
    joiner = -1
    for replica in range(count) if not any(leaving) else ():
        if own[replica] and agreed[replica] and agreed[count + replica]:
            joiner = replica
            break
    ready_epoch = int(own[joiner]) if joiner >= 0 else 0
    return Choice(joiner=joiner, ready_epoch=ready_epoch, present=present, leaving=leaving)


def admit(joiner: int, ready_epoch: int, *, asks: bool) -> View | None:
    """Ask the scheduler to admit a waiting replica. All workers of all present replicas call this.
    No worker may begin a sum until all workers have finished theirs.

    Args:
        joiner: the replica that :func:`choose` returned.
        ready_epoch: the epoch that :func:`choose` returned.
        asks: whether this worker asks the scheduler. One worker of each replica does; the others
            wait.

    Returns:
        the view that includes the replica, or None if the replica was lost meanwhile.

    Raises:
        BytePSError: this replica was removed, or a server was lost.
    """
    if asks:
        c_lib.ask_to_admit(joiner, ready_epoch)
    now = _await(
        lambda seen: (
            seen.epoch >= ready_epoch
            and (seen.ready_epochs[joiner] != ready_epoch or not seen.waiting[joiner])
        )
    )
    return now if now.present[joiner] and now.ready_epochs[joiner] == ready_epoch else None


def join() -> View:
    """Report that this worker of a late replica is ready. Wait until the replica is admitted. All
    workers of the replica call this.

    Returns:
        the view that includes this replica.

    Raises:
        BytePSError: the job has ended, this replica was removed, or a server was lost.
    """
    c_lib.say_ready()
    own_replica = session.replica()
    # Before the first report, `view` shows this replica as present by default. So its ready epoch
    # is checked, too.
    return _await(lambda seen: seen.present[own_replica] and seen.ready_epochs[own_replica] > 0)


def _await(condition: Callable[[View], bool]) -> View:
    while not condition(now := view()):
        c_lib.check()
        time.sleep(_LOOK_EVERY_S)
    return now


# State transfer between two workers, by a sum of both. Both pass tensors of the same sizes: the
# giver its values, the taker zeros. The values are added as integers, so that every bit arrives.


CHUNK_BYTES = 16 << 20
"""Number of bytes in flight at a time."""
_MAGIC = 0x42595045


def give_facts(facts: dict[str, Any], *, to: int, rank: int, name: str) -> None:
    """Send a dictionary of numbers, strings, tensors, lists and dictionaries to another worker.

    Args:
        facts: values that :func:`torch.load` accepts with ``weights_only``.
        to: the rank that calls :func:`take_facts`.
        rank: this worker's rank.
        name: the same on both workers, different for each exchange.
    """
    buffer = io.BytesIO()
    torch.save(facts, buffer)
    blob = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    head = torch.tensor([_MAGIC, len(blob), _digest(blob)], dtype=torch.int64)
    _add(head, f"{name}/head", (rank, to))
    _add(_padded(blob), f"{name}/facts", (rank, to))


def take_facts(*, giver: int, rank: int, name: str) -> dict[str, Any]:
    """Return the dictionary that the giver sends with :func:`give_facts`.

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
    """Send the values of tensors of any type and device."""
    _exchange(tensors, (rank, to), name, gives=True)


def take_tensors(tensors: Sequence[torch.Tensor], *, giver: int, rank: int, name: str) -> None:
    """Receive the values of tensors, in place.

    Raises:
        BytePSError: the giver was lost; the tensors' values are then undefined.
    """
    if not _exchange(tensors, (rank, giver), name, gives=False):
        raise BytePSError(_lost(giver))


def _lost(giver: int) -> str:
    return f"worker {giver}, which gave this one its state, was lost before it had given all"


@torch.no_grad()
def _exchange(
    tensors: Sequence[torch.Tensor], pair: tuple[int, int], name: str, *, gives: bool
) -> bool:
    """Transfer all values. Return whether both workers computed the same digest of the values."""
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
    """Cut the tensors' bytes, laid end to end, into chunks. Each chunk is a list of (offset in the
    chunk, bytes of a tensor)."""
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
    """Return the bytes as int32, padded with zeros."""
    padded = torch.zeros(-(-len(blob) // 4), dtype=torch.int32)
    padded.view(torch.uint8)[: len(blob)].copy_(blob)
    return padded


def _digest(values: torch.Tensor, before: int = 0) -> int:
    """Return the CRC-32 of the bytes of a tensor in host memory. `before`: CRC-32 of the bytes
    before them."""
    return zlib.crc32(memoryview(values.numpy()), before)
