"""The kernels that put values into blocks on a GPU: the bits of the engine's codec.

Without a GPU they run in Triton's interpreter, which reads its variable when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from byteps.torch import blocks, c_lib, wire

FORMS = {"int8": wire.int8(), "int4": wire.int4()}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LIMIT_S = 300.0


def inputs(count: int, dtype: torch.dtype, bad: float | None) -> torch.Tensor:
    """Of both signs and many magnitudes, with blocks of zeros and of nearly nothing."""
    torch.manual_seed(count)
    values = torch.randn(count) * torch.logspace(-4, 4, count)
    values[256:384] = 0
    values[384:512] *= 1e-35
    if bad is not None:
        values[count // 2] = bad
    return values.to(dtype)


def compare(device: str) -> None:
    """Kernels on this device with the engine on the CPU."""
    from byteps.torch import block_kernels

    for name, form in FORMS.items():
        for dtype in DTYPES.values():
            for count in (1, 129, 700):
                for bad in (None, float("nan"), float("inf")):
                    label = f"{name} {dtype} {count} {bad}"
                    given = inputs(count, dtype, bad)
                    one = form.empty(count, given.device)
                    other = torch.zeros_like(one, device=device)
                    lost = (torch.randn(count) * 0.01).bfloat16()
                    moved = lost.clone().to(device)
                    for kept, theirs in ((None, None), (lost, moved)):
                        for seed in (None, count * 0x123456789ABCDEF % 2**64):
                            blocks.encode(given, form, one, kept, seed)
                            block_kernels.encode(given.to(device), form, other, theirs, seed)
                            assert torch.equal(one, other.cpu()), f"{label} {seed}"
                    assert torch.equal(lost, moved.cpu()), label
                    for skip in (0, min(5, count - 1), min(100, count - 1)):
                        want = torch.empty(count - skip, dtype=dtype)
                        got = torch.empty_like(want, device=device)
                        blocks.decode(one, form, want, skip=skip)
                        block_kernels.decode(other, form, got, skip)
                        assert torch.equal(want.nan_to_num(3), got.cpu().nan_to_num(3)), label
                    if name == "int8":
                        held = torch.cat([inputs(count, dtype, None)[1:], torch.tensor([-0.0])])
                        held = held.to(dtype)
                        want, got = torch.empty_like(held), held.clone().to(device)
                        blocks.add_differences(one, held, want)
                        block_kernels.add_differences(other, got, got)
                        assert torch.equal(want.nan_to_num(3), got.cpu().nan_to_num(3)), label
                        same = want == 0
                        assert torch.equal(want[same].signbit(), got.cpu()[same].signbit()), label


@pytest.mark.parametrize("name", FORMS)
def test_the_mean_of_what_is_rounded_by_chance_is_the_value(name: str) -> None:
    form, count, times = FORMS[name], 300, 4000
    torch.manual_seed(1)
    values, total = torch.randn(count), torch.zeros(count, dtype=torch.float64)
    out, one = form.empty(count, values.device), torch.empty(count)
    for number in range(times):
        blocks.encode(values, form, out, seed=c_lib.chance_seed("values", number, 0))
        blocks.decode(out, form, one)
        total += one
    largest = torch.stack([part.abs().max() for part in values.split(wire.BLOCK)])
    scale = (largest / (127 if name == "int8" else 7)).repeat_interleave(wire.BLOCK)[:count]
    # Of one value: at most half a step, in five sigmas of so many.
    error = ((total / times - values) / scale).abs()
    assert error.max() < 5 * 0.5 / times**0.5
    blocks.encode(values, form, out)
    blocks.decode(out, form, one)
    assert ((one - values) / scale).abs().max() > 0.4, "to the nearest, some are nearly half off"


@pytest.mark.slow
def test_they_compute_the_bits_of_the_engine() -> None:
    program = "from tests.unit.test_block_kernels import compare; compare('cpu')"
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], check=True, env=env, timeout=LIMIT_S
    )


@pytest.mark.requires("gpu")
def test_on_a_gpu() -> None:
    compare("cuda")
