"""Inputs whose sum has a closed form, so that every result of a benchmark is checked.

The value at an index depends on rank, size, index and round, so a stale, swapped or torn buffer is
detected. Values are integers, small enough for a sum over all ranks to be exact in the element
type, in any order of addition. If values travel in blocks of few bits, each block has a value of
the largest magnitude. So its scale is the same on all ranks except for a power of two, and nothing
is rounded.
"""

from __future__ import annotations

import torch

# Period of the values by index. It is a prime, so no partition or tensor is a multiple of it.
PERIOD = 16381
BLOCK = 128
_MOST = {"int8": 127, "int4": 7, "fp8": 1}
"""Largest integer in a block. For fp8 it is small, so that the sum fits in four bits."""
_LARGEST_EXACT = {"bfloat16": 256, "float16": 2048, "int8": 127, "uint8": 255}


def _span(ranks: int, dtype: str) -> int:
    """Return the exclusive upper bound of values whose sum over all ranks is exact."""
    span = min(31, _LARGEST_EXACT.get(dtype, 1 << 24) // ranks + 1)
    if span < 2:
        raise ValueError(f"a sum over {ranks} ranks cannot be verified in {dtype}")
    return span


def _mixed(rank: int, size: int, round_: int, offset: int) -> torch.Tensor:
    index = torch.arange(PERIOD, dtype=torch.int64) + offset
    index %= PERIOD
    return index * 7 + (index // 61) * 11 + rank * 13 + round_ * 3 + (size % 8191) * 5


def _weight(rank: int, form: str) -> int:
    """Return the factor of a rank's values in blocks, relative to rank 0's."""
    return 1 if form == "fp8" else 1 << rank % 3


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class Pattern:
    """Inputs and sums of one size over ``ranks`` ranks."""

    def __init__(
        self, *, rank: int, ranks: int, size: int, dtype: str, device: str, form: str = "same"
    ) -> None:
        """`form`: type to which values are rounded in transit: same, bf16, fp16, int8, int4
        or fp8."""
        self._rank = rank
        self._ranks = ranks
        self._size = size
        self._dtype = dtype
        self._device = device
        self._form = form
        self._most = _MOST.get(form)

    def _values(self, rank: int, round_: int, offset: int) -> torch.Tensor:
        """Return one period of a rank's input."""
        if self._most is None:
            exact = {"bf16": "bfloat16", "fp16": "float16"}.get(self._form, self._dtype)
            return _mixed(rank, self._size, round_, offset) % _span(self._ranks, exact)
        numbers = min(self._most, 7)
        mixed = _mixed(0, self._size, round_, offset)
        return (mixed % (2 * numbers + 1) - numbers) * _weight(rank, self._form)

    def _sum(self, round_: int, offset: int) -> torch.Tensor:
        total = torch.zeros(PERIOD, dtype=torch.int64)
        for rank in range(self._ranks):
            total += self._values(rank, round_, offset)
        return total

    def _moved(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(_dtype(self._dtype)).to(self._device)

    def fill(self, tensor: torch.Tensor, round_: int, offset: int = 0) -> None:
        """Write this rank's input. ``offset``: index, within the size, of the tensor's first
        element."""
        period = self._moved(self._values(self._rank, round_, offset))
        whole = len(tensor) // PERIOD * PERIOD
        tensor[:whole].view(-1, PERIOD).copy_(period.expand(whole // PERIOD, PERIOD))
        tensor[whole:] = period[: len(tensor) - whole]
        if self._most is not None:
            tensor[::BLOCK] = self._most * _weight(self._rank, self._form)

    def count_wrong(self, tensor: torch.Tensor, round_: int, offset: int = 0) -> int:
        """Count elements that differ from the sum over all ranks. Elements that begin a block are
        overwritten."""
        want = self._moved(self._sum(round_, offset))
        wrong = 0
        if self._most is not None:
            weights = sum(_weight(rank, self._form) for rank in range(self._ranks))
            wrong += int((tensor[::BLOCK] != self._most * weights).sum())
            begins = torch.arange(0, len(tensor), BLOCK, device=tensor.device)
            tensor[::BLOCK] = want[begins % PERIOD]
        rows = 256  # limits the memory of the comparison
        for begin in range(0, len(tensor), rows * PERIOD):
            part = tensor[begin : begin + rows * PERIOD]
            whole = len(part) // PERIOD * PERIOD
            wrong += int((part[:whole].view(-1, PERIOD) != want).sum())
            wrong += int((part[whole:] != want[: len(part) - whole]).sum())
        return wrong
