"""Triton kernels that encode to and decode from blocks of few bits; compiled at first use.

They compute the same bits as base/block_codec.h. Import this module only where there is a GPU:
Triton comes with torch's CUDA builds.
"""

# Kernels have no types, and constants are in capitals, as Triton wants them.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from byteps.torch.wire import BLOCK, WireType

_ROWS = 16
"""Number of blocks that a program instance encodes or decodes."""
_HALF = tl.constexpr(BLOCK // 2)
_LEAST = tl.constexpr(2.0**-100)
_ROUNDER = tl.constexpr(1.5 * 2.0**23)
_ROUNDER_BITS = tl.constexpr(0x4B400000)
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC0)
_FIRST = tl.constexpr(0x85EBCA6B)
_SECOND = tl.constexpr(0xC2B2AE35)
_STRIDE = tl.constexpr(0x9E3779B9)
_SHARE = tl.constexpr(2.0**-16)


@triton.jit
def _words(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _floats(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def _bfloat16(x):
    """Return the bits of `x` in bfloat16, rounded to nearest even."""
    bits = _words(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # A NaN of the GPU has all bits set, and rounding would turn it into -0.
    return tl.where((bits & 0x7FFFFFFF) > _INFINITY, _NAN, rounded).to(tl.int16)


@triton.jit
def _put(out, at, count, x, IS_BFLOAT16: tl.constexpr):
    known = (at >= 0) & (at < count)
    if IS_BFLOAT16:
        tl.store(out + at, _bfloat16(x), known)
    else:
        tl.store(out + at, x.to(out.dtype.element_ty), known)


@triton.jit
def _load(values, lost, at, count, HAS_LOST: tl.constexpr):
    x = tl.load(values + at, at < count, other=0).to(tl.float32)
    if HAS_LOST:
        x += _floats(tl.load(lost + at, at < count, other=0).to(tl.int32) << 16)
    return x


@triton.jit
def _numbers(x, inverse, is_number):
    # The lowest bits of this sum are the number, rounded to nearest even.
    numbers = _words(x * inverse[:, None] + _ROUNDER) - _ROUNDER_BITS
    return tl.where(is_number[:, None], numbers, 0)


@triton.jit
def _mix(h):
    h = (h ^ (h >> 16)) * _FIRST
    h = (h ^ (h >> 13)) * _SECOND
    return h ^ (h >> 16)


@triton.jit
def _by_chance(x, inverse, is_number, row, column, low, high, MOST: tl.constexpr):
    key = _mix(_mix(low + row.to(tl.uint32) * _STRIDE) ^ high)
    bits = _mix(key[:, None] + column[None, :].to(tl.uint32) * _STRIDE) >> 16
    up = (bits.to(tl.int32).to(tl.float32) + 0.5) * _SHARE
    sum = tl.minimum(tl.maximum(x * inverse[:, None], -MOST), MOST) + up
    whole = sum.to(tl.int32)
    numbers = whole - (whole.to(tl.float32) > sum).to(tl.int32)
    return tl.where(is_number[:, None], numbers, 0)


@triton.jit
def _keep(lost, at, count, x, numbers, scale, is_finite):
    rest = tl.where(is_finite[:, None], x - numbers.to(tl.float32) * scale[:, None], 0.0)
    tl.store(lost + at, _bfloat16(rest), at < count)


@triton.jit
def _encode(
    values,
    lost,
    out,
    scales,
    count,
    blocks,
    seed_low,
    seed_high,
    MOST: tl.constexpr,
    BYTES: tl.constexpr,
    HAS_LOST: tl.constexpr,
    BY_CHANCE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Encode both halves of `ROWS` blocks, in 8 bits per value or in 4 (two values per byte)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, _HALF)
    at = row[:, None] * (2 * _HALF) + column[None, :]
    low = _load(values, lost, at, count, HAS_LOST)
    high = _load(values, lost, at + _HALF, count, HAS_LOST)
    largest = tl.maximum(tl.max(_words(low) & 0x7FFFFFFF, 1), tl.max(_words(high) & 0x7FFFFFFF, 1))
    magnitude = _floats(largest)
    up = (_words(tl.div_rn(magnitude, MOST + 0.0 * magnitude)) + 0xFFFF) >> 16
    is_finite = largest < _INFINITY
    bits = tl.where(is_finite, tl.where(magnitude < _LEAST, 0, up), _NAN)
    is_number = is_finite & (bits != 0)
    scale = tl.where(is_number, _floats(bits << 16), 0.0)
    inverse = tl.where(is_number, tl.div_rn(1.0 + 0.0 * scale, scale), 0.0)
    if BY_CHANCE:
        seed_0, two = seed_low.to(tl.uint32), seed_high.to(tl.uint32)
        first = _by_chance(low, inverse, is_number, row, column, seed_0, two, MOST)
        second = _by_chance(high, inverse, is_number, row, column + _HALF, seed_0, two, MOST)
    else:
        first = _numbers(low, inverse, is_number)
        second = _numbers(high, inverse, is_number)
    byte = out + row[:, None] * BYTES + column[None, :]
    known = (row < blocks)[:, None]
    if BYTES > 2 * _HALF:
        tl.store(byte, first.to(tl.uint8), known)
        tl.store(byte + _HALF, second.to(tl.uint8), known)
    else:
        tl.store(byte, ((first + 8) | ((second + 8) << 4)).to(tl.uint8), known)
    tl.store(scales + row * (BYTES // 2) + (BYTES // 2 - 1), bits.to(tl.int16), row < blocks)
    if HAS_LOST:
        _keep(lost, at, count, low, first, scale, is_finite)
        _keep(lost, at + _HALF, count, high, second, scale, is_finite)


@triton.jit
def _decode(
    out,
    blocks_in,
    scales,
    count,
    skip,
    blocks,
    BYTES: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, _HALF)
    known = row < blocks
    bits = tl.load(scales + row * (BYTES // 2) + (BYTES // 2 - 1), known, other=0)
    scale = _floats(bits.to(tl.int32) << 16)[:, None]
    byte = blocks_in + row[:, None] * BYTES + column[None, :]
    if BYTES > 2 * _HALF:
        low = tl.load(byte, known[:, None], other=0).to(tl.int8, bitcast=True).to(tl.float32)
        high = tl.load(byte + _HALF, known[:, None], other=0).to(tl.int8, bitcast=True)
        high = high.to(tl.float32)
    else:
        both = tl.load(byte, known[:, None], other=0).to(tl.int32)
        low = ((both & 15) - 8).to(tl.float32)
        high = ((both >> 4) - 8).to(tl.float32)
    at = row[:, None] * (2 * _HALF) + column[None, :] - skip
    _put(out, at, count, low * scale, IS_BFLOAT16)
    _put(out, at + _HALF, count, high * scale, IS_BFLOAT16)


@triton.jit
def _moved(held, at, count, difference):
    had = tl.load(held + at, at < count, other=0)
    return tl.where(difference == 0, had, (had.to(tl.float32) + difference).to(had.dtype))


@triton.jit
def _moved_bfloat16(held, at, count, difference):
    had = tl.load(held + at, at < count, other=0)
    sum = _bfloat16(_floats(had.to(tl.int32) << 16) + difference)
    return tl.where(difference == 0, had, sum)


@triton.jit
def _add_differences(
    out,
    held,
    blocks_in,
    scales,
    count,
    BYTES: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 2 * _HALF)
    at = row[:, None] * (2 * _HALF) + column[None, :]
    known = at < count
    bits = tl.load(scales + row * (BYTES // 2) + (BYTES // 2 - 1), row * 2 * _HALF < count, other=0)
    scale = _floats(bits.to(tl.int32) << 16)[:, None]
    byte = tl.load(blocks_in + row[:, None] * BYTES + column[None, :], known, other=0)
    difference = byte.to(tl.int8, bitcast=True).to(tl.float32) * scale
    if IS_BFLOAT16:
        tl.store(out + at, _moved_bfloat16(held, at, count, difference), known)
    else:
        tl.store(out + at, _moved(held, at, count, difference), known)


def encode(
    values: torch.Tensor,
    wire: WireType,
    out: torch.Tensor,
    lost: torch.Tensor | None,
    seed: int | None = None,
) -> None:
    """Do the same as `wire.encode`, in the current stream."""
    count = values.numel()
    blocks = -(-count // BLOCK)
    most = 127.0 if wire.element_bytes > BLOCK else 7.0
    with torch.cuda.device(values.device) if values.is_cuda else torch.no_grad():
        _encode[(-(-blocks // _ROWS),)](
            values,
            out.view(torch.int16) if lost is None else lost.view(torch.int16),
            out,
            out.view(torch.int16),
            count,
            blocks,
            _signed(seed or 0),
            _signed((seed or 0) >> 32),
            MOST=most,
            BYTES=wire.element_bytes,
            HAS_LOST=lost is not None,
            BY_CHANCE=seed is not None,
            ROWS=_ROWS,
            # Products and sums are rounded separately, as servers do.
            enable_fp_fusion=False,
        )


def _signed(word: int) -> int:
    """Return the lowest 32 bits as a signed number."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def decode(blocks: torch.Tensor, wire: WireType, out: torch.Tensor, skip: int) -> None:
    """Do the same as `wire.decode`, in the current stream."""
    count = out.numel()
    number = -(-(count + skip) // BLOCK)
    is_bfloat16 = out.dtype == torch.bfloat16
    used = blocks[: number * wire.element_bytes]
    with torch.cuda.device(out.device) if out.is_cuda else torch.no_grad():
        _decode[(-(-number // _ROWS),)](
            out.view(torch.int16) if is_bfloat16 else out,
            used,
            used.view(torch.int16),
            count,
            skip,
            number,
            BYTES=wire.element_bytes,
            IS_BFLOAT16=is_bfloat16,
            ROWS=_ROWS,
            enable_fp_fusion=False,
        )


def add_differences(blocks: torch.Tensor, held: torch.Tensor, out: torch.Tensor) -> None:
    """Do the same as `wire.add_differences`, in the current stream."""
    count, size = held.numel(), BLOCK + 2
    number = -(-count // BLOCK)
    is_bfloat16 = held.dtype == torch.bfloat16
    used = blocks[: number * size]
    with torch.cuda.device(held.device) if held.is_cuda else torch.no_grad():
        _add_differences[(-(-number // _ROWS),)](
            out.view(torch.int16) if is_bfloat16 else out,
            held.view(torch.int16) if is_bfloat16 else held,
            used,
            used.view(torch.int16),
            count,
            BYTES=size,
            IS_BFLOAT16=is_bfloat16,
            ROWS=_ROWS,
            enable_fp_fusion=False,
        )
