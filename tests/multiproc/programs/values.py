"""Inputs with a closed form for their sum, and error bounds of results.

Every input depends on rank, key, index and round, so a swapped or stale buffer is detected.
"""

from __future__ import annotations

import zlib

import torch

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("uint8", "int8", "int32", "int64")
DTYPES = (*FLOATS, *INTEGERS)

# Bits of the mantissa, including the hidden bit.
PRECISION = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
SMALLEST_EXPONENT = {"float64": -1022, "float32": -126, "float16": -14, "bfloat16": -126}


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def key_number(name: str) -> int:
    return zlib.crc32(name.encode()) % 997


PERIOD = 31 * 512  # Period of _whole(): not a multiple of any partition's elements.


def _whole(count: int, rank: int, key: str, round_: int, dtype: str) -> torch.Tensor:
    """Return integers, int64, small enough for exact sums of four in every dtype."""
    index = torch.arange(min(count, PERIOD), dtype=torch.int64)
    mixed = index * 7 + (index // 512) * 11 + rank * 13 + key_number(key) * 5 + round_ * 3
    return mixed % 31 - (0 if dtype == "uint8" else 15)


def _repeated(period: torch.Tensor, count: int) -> torch.Tensor:
    return period.repeat(-(-count // PERIOD))[:count].contiguous()


def exact_input(count: int, rank: int, key: str, round_: int, dtype: str) -> torch.Tensor:
    return _repeated(_whole(count, rank, key, round_, dtype).to(dtype_of(dtype)), count)


def exact_sum(
    count: int, ranks: list[int], key: str, round_: int, dtype: str, average: bool = False
) -> torch.Tensor:
    """Return the sum over these ranks, or its average: floor division for integers."""
    total = torch.stack([_whole(count, rank, key, round_, dtype) for rank in ranks]).sum(0)
    if average and dtype in INTEGERS:
        total = torch.div(total, len(ranks), rounding_mode="floor")
    elif average:
        total = total.double() / len(ranks)
    return _repeated(total.to(dtype_of(dtype)), count)


def random_input(count: int, rank: int, key: str, round_: int, dtype: str) -> torch.Tensor:
    """Return numbers of both signs over several orders of magnitude."""
    seed = (key_number(key) * 64 + rank) * 64 + round_
    source = torch.Generator().manual_seed(seed)
    size = torch.rand(count, generator=source, dtype=torch.float64) * 8 - 4
    value = torch.randn(count, generator=source, dtype=torch.float64) * size.exp()
    return value.to(dtype_of(dtype))


def ulp(value: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the distance of neighbouring numbers of `dtype` around each (float64) value."""
    exponent = torch.frexp(value.abs())[1].to(torch.float64) - 1
    exponent = exponent.clamp(min=SMALLEST_EXPONENT[dtype])
    return torch.exp2(exponent - (PRECISION[dtype] - 1))


def demand_exact(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype, f"dtype {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, want {tuple(want.shape)}"
    wrong = (got != want).flatten().nonzero().flatten()
    if len(wrong):
        first = int(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {want.numel()} wrong, the first at {first}: "
            f"{got.flatten()[first].item()}, want {want.flatten()[first].item()}"
        )


def demand_close_to(got: torch.Tensor, want: torch.Tensor, limit: torch.Tensor) -> None:
    """Check that each error of `got` against float64 `want` is at most `limit`."""
    error = (got.double() - want).abs()
    wrong = (~(error <= limit)).nonzero().flatten()
    if len(wrong):
        first = int(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {want.numel()} too far, the first at {first}: {got[first].item()}, "
            f"want {want[first].item()} within {limit[first].item():g}"
        )


def demand_rounded_sum(
    got: torch.Tensor, inputs: list[torch.Tensor], dtype: str, average: bool, wide: bool = True
) -> None:
    """Check that `got` is the sum of the inputs within the dtype's error bound.

    Half types: one rounding of an fp32 sum. fp32: one rounding of an fp64 sum; without `wide`, like
    fp64: one rounding per addition, in any order. An average adds the rounding of its division.
    """
    exact = torch.stack([value.double() for value in inputs])
    total, magnitude, count = exact.sum(0), exact.abs().sum(0), len(inputs)
    adding = {"float16": "float32", "bfloat16": "float32"}.get(dtype, dtype)
    if dtype == "float32" and wide:
        adding = "float64"
    # n - 1 additions, each wrong by at most half an ulp of the sum of magnitudes; the float64
    # reference has the same error.
    limit = (count - 1) * magnitude * 2.0 ** -PRECISION[adding]
    limit = limit + (count - 1) * magnitude * 2.0**-53
    if adding != dtype:
        # The ulp is that of the larger of the exact and the rounded sum, because the spacing
        # changes at a power of two.
        limit = limit + 0.5 * ulp(total.abs() + limit, dtype)
    if average:
        total = total / count
        limit = limit / count + 0.5 * ulp(total.abs() + limit, dtype)
        if adding != dtype:
            limit = limit + 2.0 ** -PRECISION["float32"] * total.abs()
    demand_close_to(got, total, limit)
