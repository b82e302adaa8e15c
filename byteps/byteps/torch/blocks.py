"""Values in blocks of few bits, and back: on the CPU by the engine, on a GPU by kernels."""

from __future__ import annotations

import torch
from byteps.torch import c_lib
from byteps.torch.tensors import DTYPES
from byteps.torch.wire import WireType


def encode(
    values: torch.Tensor,
    wire: WireType,
    out: torch.Tensor,
    lost: torch.Tensor | None = None,
    seed: int | None = None,
) -> None:
    """Round `values` to blocks.

    Args:
        values: flat and contiguous; fp32, bf16 or fp16.
        wire: a type of blocks.
        out: uint8, `wire.nbytes(values.numel())` of them, on the same device.
        lost: bf16, one for each value: is added to the values, and gets what rounding loses.
        seed: of `c_lib.chance_seed`, where numbers are rounded up or down by chance.
    """
    if values.is_cuda:
        from byteps.torch.block_kernels import encode as encode_on_gpu

        encode_on_gpu(values, wire, out, lost, seed)
        return
    c_lib.encode_blocks(
        wire.engine_name,
        out.data_ptr(),
        DTYPES[values.dtype],
        values.data_ptr(),
        values.numel(),
        0 if lost is None else lost.data_ptr(),
        seed,
    )


def add_differences(blocks: torch.Tensor, held: torch.Tensor, out: torch.Tensor) -> None:
    """Add to parameters what servers say, and round to their type. Servers do the same to what they
    know of them, to the bit.

    Args:
        blocks: of `wire.int8()`, at least as many as hold the values.
        held: flat and contiguous; fp32, bf16 or fp16.
        out: as `held`, which it may be.
    """
    if held.is_cuda:
        from byteps.torch.block_kernels import add_differences as add_on_gpu

        add_on_gpu(blocks, held, out)
        return
    c_lib.add_differences(
        *(blocks.data_ptr(), DTYPES[held.dtype], held.data_ptr(), held.numel(), out.data_ptr())
    )


def decode(blocks: torch.Tensor, wire: WireType, out: torch.Tensor, *, skip: int = 0) -> None:
    """The values of blocks behind the first `skip` ones, rounded to the type of `out`, which has as
    many as are wanted."""
    if out.is_cuda:
        from byteps.torch.block_kernels import decode as decode_on_gpu

        decode_on_gpu(blocks, wire, out, skip)
        return
    values = out if skip == 0 else out.new_empty(skip + out.numel())
    c_lib.decode_blocks(
        wire.engine_name, blocks.data_ptr(), DTYPES[out.dtype], values.data_ptr(), values.numel()
    )
    if skip > 0:
        out.copy_(values[skip:])
