"""One worker gives another one its state: tensors and a few facts, through the servers.

Both call with tensors of the same sizes, and servers add what the giver has to the zeros of the
taker. Whole numbers are added, so that every bit arrives.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from byteps.torch import ops
from byteps.torch.session import BytePSError

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
