"""server/reducer.cc: sums and averages of every half value, against PyTorch, to the last bit."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.once import made_once

pytestmark = pytest.mark.slow  # it compiles each build

OVERLAY = Path(__file__).parents[2] / "byteps"
LIMIT_S = 120.0
NUMBERS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 7}  # of base/dtype.h
HALVES = (torch.bfloat16, torch.float16)
DIVISORS = (1, 2, 3, 4, 6, 7, 12, 24, 1000, 4095, 2_097_151, 2_097_153)
# As it ships, choosing for this machine; for the oldest machine; and for one in between.
BUILDS = {"shipped": [], "oldest": ["-DBYTEPS_MULTIVERSION="]}
if {"avx2", "fma"} <= set(Path("/proc/cpuinfo").read_text().split()):
    BUILDS["v3"] = ["-DBYTEPS_MULTIVERSION=", "-march=x86-64-v3"]

# Exports what is tested under names that ctypes finds.
EXPORTS = """
#include "byteps/server/reducer.h"
using byteps::core::DType;
extern "C" void Add(int t, void* sum, const void* in, int divisor, size_t n) {
  byteps::core::Add(static_cast<DType>(t), sum, in, divisor, n);
}
extern "C" void Three(int t, void* last, const void* a, const void* b, void* wide, int divisor,
                      size_t n) {
  byteps::core::WideBegin(static_cast<DType>(t), wide, a, b, n);
  byteps::core::WideEnd(static_cast<DType>(t), last, wide, divisor, n);
}
"""


@pytest.fixture(scope="module", params=BUILDS)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    build = request.param

    def compile_it(folder: Path) -> None:
        (folder / "exports.cc").write_text(EXPORTS)
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O3", "-fPIC", "-shared"]
        command += [*BUILDS[build], "-I", str(OVERLAY), str(folder / "exports.cc")]
        command += [str(OVERLAY / "byteps" / "server" / "reducer.cc"), "-o"]
        subprocess.run([*command, str(folder / "reducer.so")], check=True, timeout=LIMIT_S)

    folder = made_once(tmp_path_factory, f"reducer-{build}", compile_it)
    return ctypes.CDLL(str(folder / "reducer.so"))


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def add(library: ctypes.CDLL, a: torch.Tensor, b: torch.Tensor, divisor: int) -> torch.Tensor:
    total = a.clone()
    library.Add(NUMBERS[a.dtype], pointer(total), pointer(b), divisor, ctypes.c_size_t(a.numel()))
    return total


def add_three(
    library: ctypes.CDLL, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, divisor: int
) -> torch.Tensor:
    total = c.clone()
    wide = torch.empty(a.numel(), dtype=wider(a.dtype))
    numbers = (divisor, ctypes.c_size_t(a.numel()))
    library.Three(NUMBERS[a.dtype], pointer(total), pointer(a), pointer(b), pointer(wide), *numbers)
    return total


def wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else torch.float32


def every(dtype: torch.dtype) -> torch.Tensor:
    """All 65536 values of a half type, infinities and NaNs among them."""
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits, but for a NaN's."""
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    same = (found.view(bits) == expected.view(bits)) | (found.isnan() & expected.isnan())
    where = (~same).nonzero().flatten()[:3]
    assert same.all(), f"{where}: {found[where]}, not {expected[where]}"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("divisor", DIVISORS)
def test_half_sums_round_once(library: ctypes.CDLL, dtype: torch.dtype, divisor: int) -> None:
    values = every(dtype)
    for turn in (0, 1, 255, 16384, 32768, 40000):
        other = values.roll(turn)
        exact = (values.float() + other.float()) / divisor
        assert_same(add(library, values, other, divisor), exact.to(dtype))
        exact = ((values.float() + other.float()) + other.float()) / divisor
        assert_same(add_three(library, values, other, other, divisor), exact.to(dtype))


@pytest.mark.parametrize("divisor", DIVISORS)
def test_fp32_averages_are_those_of_a_division(library: ctypes.CDLL, divisor: int) -> None:
    generator = torch.Generator().manual_seed(divisor)
    bits = torch.randint(-(2**31), 2**31, (3, 300_001), generator=generator).to(torch.int32)
    a, b, c = bits.view(torch.float32)
    wide = (a.double() + b.double() + c.double()) / divisor
    assert_same(add_three(library, a, b, c, divisor), wide.float())
    narrow = (a + b) / divisor
    normal = (narrow.abs() >= torch.finfo(torch.float32).tiny) | (narrow == 0)
    assert_same(add(library, a, b, divisor)[normal], narrow[normal])
    # Multiples of the divisor, and what lies exactly between two numbers.
    whole = torch.arange(1, 100_001, dtype=torch.float32)
    zero = torch.zeros_like(whole)
    assert_same(add(library, whole * divisor, zero, divisor), (whole * divisor + zero) / divisor)
    middle = whole.double() * 2 + 2**24 + 1
    parts = (middle * divisor).float(), (middle * divisor - (middle * divisor).float()).float()
    expected = ((parts[0].double() + parts[1].double()) / divisor).float()
    assert_same(add_three(library, *parts, zero, divisor), expected)


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 2, 15, 255, 256, 257, 511, 512, 1023, 5001])
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_any_length_at_any_address(
    library: ctypes.CDLL, dtype: torch.dtype, n: int, shift: int
) -> None:
    """Nothing is read or written that is not the tensors': guards around them stay."""
    generator = torch.Generator().manual_seed(n)
    a, b = (torch.rand((2, n), generator=generator) - 0.5).to(dtype)
    size = n * a.element_size()
    memory = torch.full((size + 64,), 0x5A, dtype=torch.uint8)
    memory[shift : shift + size] = a.view(torch.uint8)
    library.Add(
        *(NUMBERS[dtype], ctypes.c_void_p(memory.data_ptr() + shift), pointer(b), 3),
        ctypes.c_size_t(n),
    )
    found = memory[shift : shift + size].clone().view(dtype)
    assert_same(found, ((a.float() + b.float()) / 3).to(dtype))
    assert (memory[:shift] == 0x5A).all() and (memory[shift + size :] == 0x5A).all()
