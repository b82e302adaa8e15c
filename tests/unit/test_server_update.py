"""server/optimizer/update.cc: AdamW and SGD against torch, and both against fp64."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
import torch

OVERLAY = Path(__file__).parents[2] / "byteps"
LIMIT_S = 240.0
NUMBERS = {torch.float32: 0, torch.bfloat16: 7}  # of base/dtype.h
# As CMakeLists.txt compiles it.
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# As it ships, choosing for this machine, and for the oldest machine.
BUILDS = {"shipped": [], "oldest": ["-DBYTEPS_MULTIVERSION="]}
COUNT = 4099  # no multiple of any vector
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
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    folder = tmp_path_factory.mktemp("update")
    (folder / "exports.cc").write_text(EXPORTS)
    loaded = {}
    for name, options in BUILDS.items():
        command = [os.environ.get("CXX", "c++"), *FLAGS, "-fPIC", "-shared", *options]
        command += ["-I", str(OVERLAY), str(folder / "exports.cc")]
        command += [str(OVERLAY / "byteps/server/optimizer/update.cc"), "-o"]
        subprocess.run([*command, str(folder / f"{name}.so")], check=True, timeout=LIMIT_S)
        loaded[name] = ctypes.CDLL(str(folder / f"{name}.so"))
        loaded[name].Squares.restype = ctypes.c_double
    return loaded


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def numbers(*values: float) -> list[ctypes.c_double]:
    return [ctypes.c_double(value) for value in values]


def gradient(step: int, dtype: torch.dtype) -> torch.Tensor:
    """Of all sizes, and another one each step."""
    torch.manual_seed(step)
    size = torch.logspace(-6, 1, COUNT)
    return (torch.randn(COUNT) * size).to(dtype)


def rate(step: int) -> float:
    return 3e-3 / step


class Adam:
    """Steps of one build, from zero moments."""

    def __init__(self, library: ctypes.CDLL, beta1: float, decay: float) -> None:
        self.library, self.beta1, self.decay = library, beta1, decay
        torch.manual_seed(99)
        self.master = torch.randn(COUNT)
        self.state = [torch.zeros(COUNT), torch.zeros(COUNT)]

    def step(self, number: int, values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        sent = values.clone()
        self.library.AdamW(
            NUMBERS[values.dtype],
            *numbers(rate(number), self.decay, self.beta1, 0.95, 1e-8),
            ctypes.c_uint64(number),
            ctypes.c_float(scale),
            *map(pointer, (sent, self.master, *self.state)),
            ctypes.c_size_t(COUNT),
        )
        return sent


def ulps(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Of fp32 values of one sign, how far they are apart."""
    return int((found.view(torch.int32) - expected.view(torch.int32)).abs().max())


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((found.double() - exact).abs() / exact.abs().clamp_min(1e-30)).max())


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize(("beta1", "decay"), [(0.9, 0.1), (0.3, 0.0)])
def test_adamw(
    libraries: dict[str, ctypes.CDLL], dtype: torch.dtype, beta1: float, decay: float
) -> None:
    """To the bit the same by every build; beside torch's, no further from fp64."""
    ours = Adam(libraries["shipped"], beta1, decay)
    oldest = Adam(libraries["oldest"], beta1, decay)
    kinds = (torch.float32, torch.float64)
    theirs, exact = (torch.nn.Parameter(ours.master.to(kind)) for kind in kinds)
    options = {"betas": (beta1, 0.95), "eps": 1e-8, "weight_decay": decay, "foreach": False}
    optimizers = [torch.optim.AdamW([p], lr=1.0, **options) for p in (theirs, exact)]
    for number in range(1, STEPS + 1):
        values = gradient(number, dtype)
        for optimizer, parameter in zip(optimizers, (theirs, exact), strict=True):
            optimizer.param_groups[0]["lr"] = rate(number)
            parameter.grad = values.to(parameter.dtype)
            optimizer.step()
        sent = ours.step(number, values)
        assert torch.equal(sent, ours.master.to(dtype))
        assert torch.equal(oldest.step(number, values), sent)
        print(number, ulps(ours.master, theirs.detach()), ulps(ours.state[0], optimizers[0].state[theirs]["exp_avg"]), ulps(ours.state[1], optimizers[0].state[theirs]["exp_avg_sq"]))
    for a, b in zip((ours.master, *ours.state), (oldest.master, *oldest.state), strict=True):
        assert torch.equal(a, b)
    found = (ours.master, *ours.state)
    kept = [optimizer.state[p] for optimizer, p in zip(optimizers, (theirs, exact), strict=True)]
    torchs = (theirs.detach(), kept[0]["exp_avg"], kept[0]["exp_avg_sq"])
    exacts = (exact.detach(), kept[1]["exp_avg"], kept[1]["exp_avg_sq"])
    for mine, other, right in zip(found, torchs, exacts, strict=True):
        print(relative_error(mine, right), relative_error(other, right))
