"""Megatron's `--use-torch-fsdp2`: a variable sends its reduce-scatters through the servers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scripts.prepare_data import Dataset
from tests.layouts.job import Job, data_arguments

SERVED = {"BYTEPS_C10D_BACKEND": "flat", "BYTEPS_C10D_MIN_BYTES": "1"}


def test_two_hosts_have_gloo_s_losses(run_job: Callable[..., Job], dataset: Dataset) -> None:
    """Gradients of their own type have the same bits. In 8 bits losses differ by rounding."""

    def losses(*words: str, **environment: str) -> tuple[list[float], str]:
        settings = {"arguments": [*data_arguments(dataset), *words], "environment": environment}
        job = run_job("train_with_torch_fsdp2", 2, **settings)
        return job.results()[0], job.log_of(0).read_text(encoding="utf-8")

    gloo, _ = losses()
    same, log = losses("--use-dpu-reduce", **SERVED, BYTEPS_FSDP_DTYPES="same")
    assert len(same) == 4 and same == gloo
    assert "reduce-scatters of float32 over 2 ranks on 2 host(s): BytePS flat" in log
    rounded, _ = losses("--use-dpu-reduce", **SERVED, BYTEPS_FSDP_DTYPES="int8,int8")
    assert rounded != gloo and rounded == pytest.approx(gloo, rel=5e-3)
    with_flag, log = losses("--use-dpu-reduce")
    assert (
        with_flag == gloo and "BYTEPS_FSDP_DTYPES=int8 on all hosts sends them in few bits" in log
    )
