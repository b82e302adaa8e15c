"""Buffers that leave the GPU between steps: `make test-gpu PYTEST_ARGS="-k offload -s"`.

Needs no verl: tests.layouts.gpt.offload does to Megatron's buffers what verl's switches for memory
do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.layouts.job import Job
from tests.layouts.platforms import CUDA

pytestmark = pytest.mark.requires("gpu")

WIDTH = 4096
PARAMETERS = 4 * WIDTH * (WIDTH + 1)


def trained(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    job = Job(
        folder=folder,
        program="tests.layouts.gpt.offload:train",
        ranks=2,
        settings={"width": WIDTH, **settings},
        platform=CUDA,
    )
    job.run()
    return job.results()


def test_offload_gives_the_memory_back_and_changes_no_bit(run_dir: Path) -> None:
    away = trained(run_dir / "away", away=True, through_byteps=True)
    stays = trained(run_dir / "stays", away=False, through_byteps=True)
    nccl = trained(run_dir / "nccl", away=False, through_byteps=False)
    for ways in zip(away, stays, nccl, strict=True):
        first, *others = (way["checksums"] for way in ways)
        assert len(set(first)) == len(first), "a step changed nothing"
        assert all(other == first for other in others)
    for name, ranks in (("away", away), ("stays", stays), ("NCCL", nccl)):
        for rank, one in enumerate(ranks):
            shown = ", ".join(f"{phase} {n / 2**20:,.0f} MiB" for phase, n in one["bytes"].items())
            print(f"{name}, rank {rank}: most on the GPU in phase {shown}")
    for one in away:
        # bf16 parameters and fp32 gradients lie in the buffers.
        assert one["held"]["step"] >= 6 * PARAMETERS
        assert one["held"]["away"] == 0
        # BytePS keeps nothing on the GPU.
        assert one["bytes"]["away"] < 0.05 * one["bytes"]["step"]
