"""Parameters pulled during the next forward pass: the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from scripts.prepare_data import Dataset
from tests.layouts.job import Job, data_arguments
from tests.megatron.training_jobs import Trained, assert_same_run

Train = Callable[..., Trained]

SERVED = ("--dpu-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "5000")
BF16 = ("--bf16", "--grad-reduce-in-bf16")
INT8 = (*BF16, "--dpu-reduce-wire-dtype", "int8", "--dpu-reduce-keep-bf16", "256")
OVERLAP = ("--overlap-param-gather",)
thorough = pytest.mark.thorough

CASES = [
    # Embeddings are tied, most steps are clipped, gradients of two micro-batches add up.
    pytest.param((*INT8, "--train-iters", "50", "--global-batch-size", "8"), id="fifty-steps"),
    pytest.param(
        ("--fp16", "--initial-loss-scale", str(2**18), "--hysteresis", "1"), id="skipped-steps"
    ),
    pytest.param(
        (*BF16, "--recompute-granularity", "full", "--recompute-method", "uniform",
         "--recompute-num-layers", "1"), id="recompute", marks=thorough,
    ),
    pytest.param((*INT8, "--clip-grad", "1000"), id="clips-never", marks=thorough),
    pytest.param((*BF16, "--clip-grad", "0"), id="no-clip", marks=thorough),
]  # fmt: skip
PIPELINE = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "8")


def same_bits(train: Train, *arguments: str, **settings: object) -> Trained:
    overlapped = train(*arguments, *OVERLAP, **settings)
    assert_same_run(overlapped, train(*arguments, **settings))
    return overlapped


@pytest.mark.parametrize("arguments", CASES)
def test_a_forward_pass_that_begins_early_computes_the_same(
    train: Train, arguments: tuple[str, ...]
) -> None:
    overlapped = same_bits(train, *SERVED, *arguments)
    assert overlapped.losses[-1] < overlapped.losses[0]
    assert "steps wait for all" not in overlapped.job.log_of(0).read_text()


def test_pipeline_stages_wait_for_their_own_parameters(
    run_job: Callable[..., Job], dataset: Dataset
) -> None:
    common = [*data_arguments(dataset), *SERVED, *INT8, *PIPELINE]
    ours, theirs = (run_job("train", 4, arguments=[*common, *more]) for more in (OVERLAP, ()))
    for rank in range(4):
        seen, other = ours.result(rank), theirs.result(rank)
        assert [step.loss for step in seen.steps] == [step.loss for step in other.steps]
        assert seen.parameters.keys() == other.parameters.keys()
        for name, value in seen.parameters.items():
            assert torch.equal(value, other.parameters[name]), name
