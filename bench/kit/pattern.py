"""Inputs whose sum has a closed form, so that every result of a benchmark is checked.

The value at an index depends on rank, size, index and round: a stale, swapped or torn buffer shows.
Values are whole and so small that a sum over all ranks is exact in the element type, in whatever
order it is added.
"""

from __future__ import annotations

import torch

# In the index. A prime: no partition, and no tensor, is a multiple of it.
PERIOD = 16381
_LARGEST_EXACT = {"bfloat16": 256, "float16": 2048, "int8": 127, "uint8": 255}


def _span(ranks: int, dtype: str) -> int:
    """Values are below this, so that the sum over all ranks is exact."""
    span = min(31, _LARGEST_EXACT.get(dtype, 1 << 24) // ranks + 1)
    if span < 2:
        raise ValueError(f"a sum over {ranks} ranks cannot be verified in {dtype}")
    return span


def _whole(rank: int, ranks: int, size: int, round_: int, dtype: str, offset: int) -> torch.Tensor:
    index = torch.arange(PERIOD, dtype=torch.int64) + offset
    index %= PERIOD
    mixed = index * 7 + (index // 61) * 11 + rank * 13 + round_ * 3 + (size % 8191) * 5
    return mixed % _span(ranks, dtype)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class Pattern:
    """The inputs and the sums of one size, over ``ranks`` ranks."""

    def __init__(self, *, rank: int, ranks: int, size: int, dtype: str, device: str) -> None:
        self._rank = rank
        self._ranks = ranks
        self._size = size
        self._dtype = dtype
        self._device = device

    def _moved(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(_dtype(self._dtype)).to(self._device)

    def fill(self, tensor: torch.Tensor, round_: int, offset: int = 0) -> None:
        """Write this rank's input; ``offset`` is the tensor's first index within the size."""
        one = _whole(self._rank, self._ranks, self._size, round_, self._dtype, offset)
        period = self._moved(one)
        whole = len(tensor) // PERIOD * PERIOD
        tensor[:whole].view(-1, PERIOD).copy_(period.expand(whole // PERIOD, PERIOD))
        tensor[whole:] = period[: len(tensor) - whole]

    def count_wrong(self, tensor: torch.Tensor, round_: int, offset: int = 0) -> int:
        """Elements that are not the sum over all ranks."""
        total = torch.zeros(PERIOD, dtype=torch.int64)
        for rank in range(self._ranks):
            total += _whole(rank, self._ranks, self._size, round_, self._dtype, offset)
        want = self._moved(total)
        wrong = 0
        rows = 256  # bounds the memory of the comparison
        for begin in range(0, len(tensor), rows * PERIOD):
            part = tensor[begin : begin + rows * PERIOD]
            whole = len(part) // PERIOD * PERIOD
            wrong += int((part[:whole].view(-1, PERIOD) != want).sum())
            wrong += int((part[whole:] != want[: len(part) - whole]).sum())
        return wrong
