"""Blocks of fp8 values. Gradients can travel in them over NCCL, which is measured for
comparison."""

from __future__ import annotations

import torch

BLOCK = 128
_LARGEST = 448.0
"""Largest value of e4m3."""


def encode(values: torch.Tensor) -> torch.Tensor:
    """Encode fp32 values into blocks of 130 bytes. The number of values must be a multiple of 128.

    Scales are powers of two, so scaling does not round.
    """
    blocks = values.view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True).clamp(min=2.0**-100)
    scale = torch.exp2(torch.ceil(torch.log2(largest / _LARGEST)))
    numbers = (blocks / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    # The values are integers, because torch does not compile views with another element size.
    bits = scale.to(torch.bfloat16).view(torch.int16)
    low, high = (bits & 255).to(torch.uint8), ((bits >> 8) & 255).to(torch.uint8)
    return torch.cat([numbers, low, high], 1).view(-1)


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """Decode blocks into fp32 values."""
    rows = blocks.view(-1, BLOCK + 2)
    numbers = rows[:, :BLOCK].contiguous().view(torch.float8_e4m3fn).float()
    low, high = rows[:, BLOCK:].to(torch.int16).split(1, 1)
    scale = (low | (high << 8)).view(torch.bfloat16).float()
    return (numbers * scale).view(-1)


def add(received: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the blocks of the sum of `ranks` ranks' blocks."""
    return encode(decode(received).view(ranks, -1).sum(0))
