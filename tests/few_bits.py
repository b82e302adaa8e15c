"""Expected sums in blocks of few bits, to the bit: from the format, in torch alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK = 128
MOST = {"int8": 127, "int4": 7}
_WORD, _STRIDE = 0xFFFFFFFF, 0x9E3779B9
LEAST = 2.0**-100
"""A block whose largest magnitude is below this value is zero."""


def chance_seed(name: str, number: int, rank: int) -> int:
    """Get the seed of stochastic rounding by a rank, or by the servers (-1), in a round of
    a sum."""
    digest = 0
    for data in (
        name.encode(),
        number.to_bytes(4, "little"),
        rank.to_bytes(4, "little", signed=True),
    ):
        digest ^= 14695981039346656037
        for byte in data:
            digest = (digest ^ byte) * 1099511628211 % (1 << 64)
    return digest


def _mix(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ (words >> 16)) * 0x85EBCA6B & _WORD
    words = (words ^ (words >> 13)) * 0xC2B2AE35 & _WORD
    return words ^ (words >> 16)


def _up(blocks: int, seed: int) -> torch.Tensor:
    """Get the offset of each value before it is rounded down: above 0, below 1."""
    numbers = torch.arange(blocks)
    low = _mix(((seed & _WORD) + numbers * _STRIDE) & _WORD)
    keys = _mix(low ^ (seed >> 32))
    places = torch.arange(BLOCK)
    bits = _mix((keys[:, None] + places * _STRIDE) & _WORD) >> 16
    return (bits.float() + 0.5) / 65536


def rounded(values: torch.Tensor, form: str, seed: int | None = None) -> torch.Tensor:
    """Round values like a transfer does; flat fp32 of any length.

    `seed`: Seed of stochastic rounding.
    """
    count = values.numel()
    padded = torch.zeros(-(-count // BLOCK) * BLOCK)
    padded[:count] = values.float()
    blocks = padded.view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True)  # NaN if there is any
    up = ((largest / MOST[form]).view(torch.int32) + 0xFFFF) >> 16 << 16
    scale = torch.where(largest < LEAST, torch.zeros(()), up.view(torch.float32))
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros(()))
    numbers = torch.round(blocks * inverse)
    if seed is not None:
        most = MOST[form]
        numbers = torch.floor((blocks * inverse).clamp(-most, most) + _up(len(blocks), seed))
    out = torch.where(largest.isfinite(), numbers * scale, torch.full((), torch.nan))
    return out.view(-1)[:count]


def moved(held: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Get the workers' parameters after servers have sent the difference to the new values."""
    difference = rounded(wanted.float() - held.float(), "int8")
    return torch.where(difference == 0, held, (held.float() + difference).to(held.dtype))


class Rounding:
    """Rounds values at the same positions repeatedly. Error feedback adds the last rounding
    errors."""

    def __init__(self, form: str, *, feedback: bool) -> None:
        self._form = form
        self._feedback = feedback
        self._lost: torch.Tensor | None = None

    def forget(self) -> None:
        """Drop the previous rounding errors."""
        self._lost = None

    def __call__(self, values: torch.Tensor, seed: int | None = None) -> torch.Tensor:
        values = values.float()
        if self._feedback and self._lost is not None:
            values = values + self._lost.float()
        out = rounded(values, self._form, seed)
        lost = torch.where(out.isnan(), torch.zeros(()), values - out)
        self._lost = lost.to(torch.bfloat16)
        return out


class Sums:
    """Sums of a name over all ranks, in rank order, by round."""

    def __init__(
        self, form: str, ranks: int, *, feedback: bool = False, chance: str | None = None
    ) -> None:
        """`chance`: the name, for stochastic rounding."""
        self._chance, self._round = chance, 0
        self._up = [Rounding(form, feedback=feedback) for _ in range(ranks)]
        self._down = Rounding(form, feedback=feedback)

    def forget(self) -> None:
        """Drop the previous rounding errors."""
        for rounding in (*self._up, self._down):
            rounding.forget()

    def __call__(self, inputs: Sequence[torch.Tensor], *, average: bool) -> torch.Tensor:
        """Compute the next round's sum, in the dtype of the inputs."""
        name, number = self._chance, self._round
        self._round += 1

        def seed(rank: int) -> int | None:
            return None if name is None else chance_seed(name, number, rank)

        pushed = [
            rounding(values, seed(rank))
            for rank, (rounding, values) in enumerate(zip(self._up, inputs, strict=True))
        ]
        if len(pushed) == 1:
            return pushed[0].to(inputs[0].dtype)
        total = pushed[0].clone()
        for values in pushed[1:]:
            total += values
        if average:
            total = total / len(pushed)
        return self._down(total, seed(-1)).to(inputs[0].dtype)
