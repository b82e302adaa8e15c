"""server/optimizer/update.cc and server/reducer.cc against PyTorch: AdamW, SGD, sums, averages."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.native import made_once

pytestmark = pytest.mark.slow  # it compiles each build

OVERLAY = Path(__file__).parents[2] / "byteps"
LIMIT_S = 240.0
NUMBERS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 7}  # values of base/dtype.h
# The flags are those of CMakeLists.txt.
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# The shipped build, which chooses code for this machine, and a build for the oldest machine.
BUILDS = {"shipped": [], "oldest": ["-DBYTEPS_MULTIVERSION="]}
COUNT = 4099  # not a multiple of any vector length
STEPS = 6

EXPORTS = """
#include "byteps/server/optimizer/update.h"
using namespace byteps::core;
extern "C" void AdamW(int t, double rate, double decay, double beta1, double beta2, double eps,
                      uint64_t number, float scale, void* values, float* master, float* mean,
                      float* square, size_t n) {
  UpdateAdamW(static_cast<DType>(t), {rate, decay, beta1, beta2, eps, number, scale}, values,
              master, mean, square, n);
}
extern "C" void PreviewOfAdamW(int t, double rate, double decay, double beta1, double beta2,
                               double eps, uint64_t number, float scale, const void* gradients,
                               const float* master, const float* mean, const float* square,
                               size_t n, void* parameters) {
  PreviewAdamW(static_cast<DType>(t), {rate, decay, beta1, beta2, eps, number, scale}, gradients,
               parameters, master, mean, square, n);
}
extern "C" void PreviewOfSgd(int t, double rate, double decay, double momentum, double dampening,
                             int nesterov, int first, float scale, const void* gradients,
                             const float* master, const float* kept, size_t n, void* parameters) {
  PreviewSgd(static_cast<DType>(t),
             {rate, decay, momentum, dampening, nesterov != 0, first != 0, scale}, gradients,
             parameters, master, kept, n);
}
extern "C" void Sgd(int t, double rate, double decay, double momentum, double dampening,
                    int nesterov, int first, float scale, void* values, float* master, float* kept,
                    size_t n) {
  UpdateSgd(static_cast<DType>(t),
            {rate, decay, momentum, dampening, nesterov != 0, first != 0, scale}, values, master,
            kept, n);
}
extern "C" double Squares(int t, const void* values, size_t n) {
  return SumOfSquares(static_cast<DType>(t), values, n);
}
extern "C" uint64_t Zeros(int t, const void* values, size_t n) {
  return CountZeros(static_cast<DType>(t), values, n);
}
"""


def compile_library(folder: Path, name: str, exports: str, source: Path, *flags: str) -> None:
    """Compile NAME.so from the exports and the source, by ccache if it is installed."""
    (folder / "exports.cc").write_text(exports)
    compiler = os.environ.get("CXX", "c++")
    compile_it = [*(["ccache"] if shutil.which("ccache") else []), compiler, *flags, "-fPIC"]
    objects = []
    for file in ("exports.cc", str(source)):
        objects.append(f"{name}-{Path(file).stem}.o")
        command = [*compile_it, "-I", str(OVERLAY), "-c", file, "-o", objects[-1]]
        subprocess.run(command, cwd=folder, check=True, timeout=LIMIT_S)
    link = [compiler, "-shared", *objects, "-o", f"{name}.so"]
    subprocess.run(link, cwd=folder, check=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    def compile_all(folder: Path) -> None:
        for name, options in BUILDS.items():
            source = OVERLAY / "byteps/server/optimizer/update.cc"
            compile_library(folder, name, EXPORTS, source, *FLAGS, *options)

    folder = made_once(tmp_path_factory, "update", compile_all)
    loaded = {name: ctypes.CDLL(str(folder / f"{name}.so")) for name in BUILDS}
    for library in loaded.values():
        library.Squares.restype = ctypes.c_double
    return loaded


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def numbers(*values: float) -> list[ctypes.c_double]:
    return [ctypes.c_double(value) for value in values]


def gradient(step: int, dtype: torch.dtype) -> torch.Tensor:
    """Make gradients of all magnitudes, different in each step."""
    torch.manual_seed(step)
    size = torch.logspace(-6, 1, COUNT)
    return (torch.randn(COUNT) * size).to(dtype)


def rate(step: int) -> float:
    return 3e-3 / step


class Adam:
    """Steps of a build, from zero moments."""

    def __init__(self, library: ctypes.CDLL, beta1: float, decay: float) -> None:
        self.library, self.beta1, self.decay = library, beta1, decay
        torch.manual_seed(99)
        self.master = torch.randn(COUNT)
        self.state = [torch.zeros(COUNT), torch.zeros(COUNT)]

    def step(self, number: int, values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        sent, tried = values.clone(), torch.empty_like(values)
        arguments = (
            NUMBERS[values.dtype],
            *numbers(rate(number), self.decay, self.beta1, 0.95, 1e-8),
            ctypes.c_uint64(number),
            ctypes.c_float(scale),
            *map(pointer, (sent, self.master, *self.state)),
            ctypes.c_size_t(COUNT),
        )
        before = [self.master.clone(), *(part.clone() for part in self.state)]
        self.library.PreviewOfAdamW(*arguments, pointer(tried))
        assert all(map(torch.equal, before, [self.master, *self.state]))
        self.library.AdamW(*arguments)
        assert torch.equal(tried, sent), "a step that is tried gives other parameters"
        return sent


class Reference:
    """torch's optimizer over the same parameters, in fp32 or fp64."""

    def __init__(self, kind: type, start: torch.Tensor, dtype: torch.dtype, **options: Any) -> None:
        self.parameter = torch.nn.Parameter(start.to(dtype, copy=True))
        self.optimizer = kind([self.parameter], lr=1.0, foreach=False, **options)

    def step(self, number: int, values: torch.Tensor) -> None:
        self.optimizer.param_groups[0]["lr"] = rate(number)
        self.parameter.grad = values.to(self.parameter.dtype)
        self.optimizer.step()

    def values_of(self, *names: str) -> list[torch.Tensor]:
        state = self.optimizer.state[self.parameter]
        return [self.parameter.detach(), *(state[name] for name in names)]


def ulps(computed: torch.Tensor, expected: torch.Tensor) -> float:
    """Get the largest difference in units of the last place of the larger value."""
    size = torch.maximum(computed.abs(), expected.abs())
    return float(((computed - expected).abs() / (torch.nextafter(size, size + 1) - size)).max())


def mean_error(computed: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((computed.double() - exact).abs() / exact.abs().clamp_min(1e-30)).mean())


def rounds_roots() -> bool:
    """Return whether torch's square roots are correctly rounded. On some CPUs they are not."""
    values = torch.rand(COUNT)
    return torch.equal(values.sqrt(), values.double().sqrt().float())


def demand_as_torch(computed: list[torch.Tensor], theirs: Reference, exact: Reference) -> None:
    """Check that moments are equal to the bit, that parameters differ by at most one ulp, and that
    errors against fp64 are no larger than torch's."""
    names = [name for name in theirs.optimizer.state[theirs.parameter] if name != "step"]
    others, rights = theirs.values_of(*names), exact.values_of(*names)
    exact_roots = rounds_roots()
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":  # otherwise torch does not fuse
        if exact_roots:
            assert ulps(computed[0], others[0]) <= 1
        # If square roots are inexact, a step may be off by its own ulp, which is at most some
        # learning rates. A parameter's ulp was twice as large before the parameter fell below a
        # power of two.
        size = torch.maximum(computed[0].abs(), others[0].abs())
        limit = 2 * (torch.nextafter(size, size + 1) - size) + 2.0**-23 * 4 * STEPS * rate(1)
        assert bool(((computed[0] - others[0]).abs() <= limit).all())
        assert all(torch.equal(a, b) for a, b in zip(computed[1:], others[1:], strict=True))
    for own, other, right in zip(computed, others, rights, strict=True):
        # Other roots have other errors of the same size.
        assert mean_error(own, right) <= (1.01 if exact_roots else 1.05) * mean_error(other, right)
        assert mean_error(own, right) < 1e-5


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize(("beta1", "decay"), [(0.9, 0.1), (0.3, 0.0)])
def test_adamw(
    libraries: dict[str, ctypes.CDLL], dtype: torch.dtype, beta1: float, decay: float
) -> None:
    builds = {name: Adam(library, beta1, decay) for name, library in libraries.items()}
    ours = builds["shipped"]
    options = {"betas": (beta1, 0.95), "eps": 1e-8, "weight_decay": decay}
    theirs, exact = (
        Reference(torch.optim.AdamW, ours.master, kind, **options)
        for kind in (torch.float32, torch.float64)
    )
    for number in range(1, STEPS + 1):
        values = gradient(number, dtype)
        for reference in (theirs, exact):
            reference.step(number, values)
        sent = [build.step(number, values) for build in builds.values()]
        assert all(torch.equal(values, ours.master.to(dtype)) for values in sent)
    demand_as_torch([ours.master, *ours.state], theirs, exact)
    for other in builds.values():
        assert torch.equal(other.master, ours.master)
        assert all(torch.equal(a, b) for a, b in zip(other.state, ours.state, strict=True))


@pytest.mark.parametrize(("beta1", "scale"), [(0.9, 0.37), (0.3, 1e-3)])
def test_scaled_gradients(libraries: dict[str, ctypes.CDLL], beta1: float, scale: float) -> None:
    """Scaling gives the same result as multiplied gradients."""
    scaled, plain = (Adam(libraries["shipped"], beta1, 0.1) for _ in range(2))
    values = gradient(1, torch.float32)
    assert torch.equal(scaled.step(1, values, scale), plain.step(1, values * scale))
    assert not torch.equal(plain.state[0], torch.zeros(COUNT))


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"),
    [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.25, False), (0.9, 0.0, True)],
)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd(
    libraries: dict[str, ctypes.CDLL],
    dtype: torch.dtype,
    momentum: float,
    dampening: float,
    nesterov: bool,
    decay: float,
) -> None:
    start = torch.randn(COUNT, generator=torch.Generator().manual_seed(3))
    options = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    theirs, exact = (
        Reference(torch.optim.SGD, start, kind, weight_decay=decay, **options)
        for kind in (torch.float32, torch.float64)
    )
    computed = []
    for library in libraries.values():
        master, unused = start.clone(), torch.zeros(COUNT)
        for number in range(1, STEPS + 1):
            sent = gradient(number, dtype)
            tried = torch.empty_like(sent)
            arguments = (
                NUMBERS[dtype],
                *numbers(rate(number), decay, momentum, dampening),
                *(int(nesterov), int(number == 1), ctypes.c_float(1.0)),
                *map(pointer, (sent, master, unused)),
                ctypes.c_size_t(COUNT),
            )
            library.PreviewOfSgd(*arguments, pointer(tried))
            library.Sgd(*arguments)
            assert torch.equal(sent, master.to(dtype))
            assert torch.equal(tried, sent)
        computed.append([master, unused] if momentum else [master])
    for number in range(1, STEPS + 1):
        for reference in (theirs, exact):
            reference.step(number, gradient(number, dtype))
    if not momentum:  # torch has the name, but no value
        for reference in (theirs, exact):
            reference.optimizer.state[reference.parameter].clear()
    demand_as_torch(computed[0], theirs, exact)
    assert all(torch.equal(a, b) for a, b in zip(*computed, strict=True))


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("count", [1, 15, 16, COUNT])
def test_squares(libraries: dict[str, ctypes.CDLL], dtype: torch.dtype, count: int) -> None:
    values = gradient(1, dtype)[:count].clone()
    exact = float(values.double().square().sum())
    computed = {
        library.Squares(NUMBERS[dtype], pointer(values), ctypes.c_size_t(count))
        for library in libraries.values()
    }
    assert len(computed) == 1
    assert abs(computed.pop() - exact) <= 1e-14 * exact
    values[count // 2] = float("nan")
    squares = libraries["shipped"].Squares(NUMBERS[dtype], pointer(values), ctypes.c_size_t(count))
    assert squares != squares


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("count", [1, 15, 16, COUNT])
def test_zeros(libraries: dict[str, ctypes.CDLL], dtype: torch.dtype, count: int) -> None:
    values = gradient(1, dtype)[:count].clone()
    values[::3] = 0.0
    values[::7] = -0.0
    values[1::7] = float("nan")
    for library in libraries.values():
        zeros = library.Zeros(NUMBERS[dtype], pointer(values), ctypes.c_size_t(count))
        assert zeros == count - int(torch.count_nonzero(values))


# server/reducer.cc: sums and averages of every 16-bit value, against PyTorch, to the last bit.


HALVES = (torch.bfloat16, torch.float16)
DIVISORS = (1, 2, 3, 4, 6, 7, 12, 24, 1000, 4095, 2_097_151, 2_097_153)
# Three builds: the shipped one, which chooses code for this machine; one for the oldest machine;
# and one for a machine between them.
REDUCER_BUILDS = {"shipped": [], "oldest": ["-DBYTEPS_MULTIVERSION="]}
if {"avx2", "fma"} <= set(Path("/proc/cpuinfo").read_text().split()):
    REDUCER_BUILDS["v3"] = ["-DBYTEPS_MULTIVERSION=", "-march=x86-64-v3"]

# Exports of the tested functions under names for ctypes.
REDUCER_EXPORTS = """
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


@pytest.fixture(scope="module", params=REDUCER_BUILDS)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    build = request.param

    def compile_it(folder: Path) -> None:
        source, flags = OVERLAY / "byteps/server/reducer.cc", ("-std=c++20", "-O3")
        compile_library(folder, "reducer", REDUCER_EXPORTS, source, *flags, *REDUCER_BUILDS[build])

    folder = made_once(tmp_path_factory, f"reducer-{build}", compile_it)
    return ctypes.CDLL(str(folder / "reducer.so"))


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
    """All 65536 values of a 16-bit type, with infinities and NaNs."""
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)


def assert_same(computed: torch.Tensor, expected: torch.Tensor) -> None:
    """Check for equal bits, except in NaNs."""
    bits = torch.int32 if computed.dtype == torch.float32 else torch.int16
    same = (computed.view(bits) == expected.view(bits)) | (computed.isnan() & expected.isnan())
    where = (~same).nonzero().flatten()[:3]
    assert same.all(), f"{where}: {computed[where]}, not {expected[where]}"


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
    # Multiples of the divisor, and values exactly between two numbers.
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
    """Nothing outside the tensors is read or written: the guards around them are unchanged."""
    generator = torch.Generator().manual_seed(n)
    a, b = (torch.rand((2, n), generator=generator) - 0.5).to(dtype)
    size = n * a.element_size()
    memory = torch.full((size + 64,), 0x5A, dtype=torch.uint8)
    memory[shift : shift + size] = a.view(torch.uint8)
    library.Add(
        *(NUMBERS[dtype], ctypes.c_void_p(memory.data_ptr() + shift), pointer(b), 3),
        ctypes.c_size_t(n),
    )
    computed = memory[shift : shift + size].clone().view(dtype)
    assert_same(computed, ((a.float() + b.float()) / 3).to(dtype))
    assert (memory[:shift] == 0x5A).all() and (memory[shift + size :] == 0x5A).all()
