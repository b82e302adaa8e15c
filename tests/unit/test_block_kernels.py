"""The kernels that put values into blocks on a GPU: the bits of the engine's codec.

Without a GPU they run in Triton's interpreter, which reads its variable when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from byteps.torch import blocks, wire

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
                        blocks.encode(given, form, one, kept)
                        block_kernels.encode(given.to(device), form, other, theirs)
                        assert torch.equal(one, other.cpu()), label
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
