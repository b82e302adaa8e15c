"""The rival with as few bytes: blocks of fp8 by collectives of torch.distributed.

Each rank rounds its values to blocks of 128 fp8 (e4m3) with one scale, an all-to-all gives each
rank everybody's blocks of its part, it adds them in fp32 and rounds the sum, and an all-gather
gives all parts to all. A host's link carries 2 (n - 1) / n of the blocks' bytes each way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

BLOCK = 128
_LARGEST = 448.0
"""Of e4m3."""


def encode(values: torch.Tensor) -> torch.Tensor:
    """Blocks of 130 bytes of fp32 values whose number is a multiple of 128.

    Scales are powers of two, which lose nothing of what a floating-point format keeps.
    """
    blocks = values.view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True).clamp(min=2.0**-100)
    scale = torch.exp2(torch.ceil(torch.log2(largest / _LARGEST)))
    numbers = (blocks / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    # By whole numbers: torch compiles no view of another size.
    bits = scale.to(torch.bfloat16).view(torch.int16)
    low, high = (bits & 255).to(torch.uint8), ((bits >> 8) & 255).to(torch.uint8)
    return torch.cat([numbers, low, high], 1).view(-1)


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """The values of blocks, fp32."""
    rows = blocks.view(-1, BLOCK + 2)
    numbers = rows[:, :BLOCK].contiguous().view(torch.float8_e4m3fn).float()
    low, high = rows[:, BLOCK:].to(torch.int16).split(1, 1)
    scale = (low | (high << 8)).view(torch.bfloat16).float()
    return (numbers * scale).view(-1)


def add(received: torch.Tensor, ranks: int) -> torch.Tensor:
    """The blocks of the sum of what this many ranks have sent."""
    return encode(decode(received).view(ranks, -1).sum(0))


class Fp8:
    """Sums in blocks of fp8."""

    sums = True

    def __init__(self, name: str) -> None:
        self._group = dist.new_group(backend=name)
        compile_: Callable[[Any], Any] = torch.compile if name == "nccl" else lambda f: f
        self._encode, self._decode, self._add = map(compile_, (encode, decode, add))

    def form(self, wire: str) -> str:
        return "fp8"

    def reduce(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        ranks, sent = dist.get_world_size(), []
        for tensor in tensors:
            unit = ranks * BLOCK
            padded = tensor
            if tensor.numel() % unit:
                padded = torch.nn.functional.pad(tensor, (0, unit - tensor.numel() % unit))
            blocks = self._encode(padded)
            received = torch.empty_like(blocks)
            work = dist.all_to_all_single(received, blocks, group=self._group, async_op=True)
            sent.append((tensor, blocks, received, work))
        gathered = []
        for tensor, blocks, received, work in sent:
            work.wait()
            part = self._add(received, ranks)
            work = dist.all_gather_into_tensor(blocks, part, group=self._group, async_op=True)
            gathered.append((tensor, blocks, part, work))
        for tensor, blocks, _, work in gathered:
            work.wait()
            tensor.copy_(self._decode(blocks)[: tensor.numel()])

    def close(self) -> None:
        dist.destroy_process_group(self._group)
