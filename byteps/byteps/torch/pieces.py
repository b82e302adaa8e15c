"""The pieces of a tensor that the ranks of a host sum first, each by itself.

A piece is on the network while the host sums another one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

Range = tuple[int, int]
"""First element, and last plus one."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a tensor that is summed by itself. The same on all ranks, but for `wanted`."""

    scatters: tuple[tuple[Range, ...], ...]
    """Reduce-scatters inside the host: of each, the elements that local index 0, 1, ... gets."""
    wanted: Range | None
    """The range, within this rank's scattered elements laid end to end, whose sum it pulls. None:
    all of it."""
    gather: bool
    """Whether all ranks of the host want all of it."""

    @functools.cached_property
    def length(self) -> int:
        """Elements that a rank pushes."""
        return sum(longest(ranges) for ranges in self.scatters)

    @functools.cached_property
    def is_in_place(self) -> bool:
        """Whether a rank pushes its part from where it lies in the tensor."""
        return len(self.scatters) == 1 and are_even(self.scatters[0])


def longest(ranges: Sequence[Range]) -> int:
    """Length of the longest range, in elements."""
    return max(end - begin for begin, end in ranges)


def are_even(ranges: Sequence[Range]) -> bool:
    """Whether all ranges have the same length."""
    return len({end - begin for begin, end in ranges}) == 1


def whole_pieces(elements: int, per_host: int, pieces: int) -> list[Piece]:
    """Cut a tensor that every rank wants all of, into at most `pieces`.

    Only the last piece may be no multiple of `per_host`: its last ranges are then shorter.
    """
    each = max(1, elements // pieces // per_host) * per_host
    begins = [index * each for index in range(min(pieces, -(-elements // each)))]
    cut = []
    for begin, end in zip(begins, [*begins[1:], elements], strict=True):
        part = -(-(end - begin) // per_host)
        edges = [min(begin + index * part, end) for index in range(per_host + 1)]
        ranges = tuple(itertools.pairwise(edges))
        cut.append(Piece(scatters=(ranges,), wanted=None, gather=True))
    return cut


def shard_pieces(
    elements: int, owned: Sequence[Sequence[int]], host: int, local: int, pieces: int
) -> list[Piece] | None:
    """Cut a tensor of which each rank wants one of several equal shards.

    Args:
        elements: of the tensor, a multiple of the number of shards.
        owned: for each host, the shard that each of its ranks owns.
        host, local: which of these this rank is.
        pieces: about so many are made.

    Returns:
        None where ranks of different local indices own the same shard, or not all shards have an
        owner: the parts that they push would overlap, or leave something out.
    """
    per_host = len(owned[0])
    parts = [sorted({shards[index] for shards in owned}) for index in range(per_host)]
    shards = sum(len(part) for part in parts)
    if len({len(part) for part in parts}) != 1 or {s for part in parts for s in part} != set(
        range(shards)
    ):
        return None
    size, slabs, mine = elements // shards, len(parts[0]), owned[host][local]
    if slabs >= pieces:
        groups = [range(slabs * p // pieces, slabs * (p + 1) // pieces) for p in range(pieces)]
        return [_slab_piece(parts, group, (0, size), size, local, mine) for group in groups]
    cuts = max(1, min(pieces // slabs, size))
    edges = [size * c // cuts for c in range(cuts + 1)]
    return [
        _slab_piece(parts, (slab,), edge, size, local, mine)
        for slab in range(slabs)
        for edge in itertools.pairwise(edges)
    ]


def _slab_piece(
    parts: Sequence[Sequence[int]],
    slabs: Sequence[int],
    cut: Range,
    size: int,
    local: int,
    mine: int,
) -> Piece:
    """The same cut of some shards of each local index; slab t holds everybody's t-th shard."""
    begin, end = cut
    scatters = [
        tuple((part[slab] * size + begin, part[slab] * size + end) for part in parts)
        for slab in slabs
    ]
    wanted = (0, 0)
    for place, slab in enumerate(slabs):
        if parts[local][slab] == mine:
            wanted = (place * (end - begin), (place + 1) * (end - begin))
    return Piece(scatters=tuple(scatters), wanted=wanted, gather=False)
