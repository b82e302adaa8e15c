"""A run that is saved under one backend goes on under the other as if nothing had happened.

With two ranks all sums are the same to the last bit, so that the run that goes on must equal the
one that was never interrupted, whichever backend that had.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts.prepare_data import Dataset
from tests.layouts.data import data_arguments
from tests.layouts.job import Job
from tests.megatron.training_jobs import Trained, same

Train = Callable[..., Trained]

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "5000")
TORCH = ("--ckpt-format", "torch")
BYTEPS = ("--use-dpu-reduce",)

CASES = {
    "byteps-then-all-reduce": (BYTEPS, (), ("--bf16",)),
    "all-reduce-then-byteps": ((), BYTEPS, TORCH),
    "byteps-then-all-reduce-sharded": (BYTEPS, (), (*SHARDED, "--overlap-param-gather")),
    "all-reduce-then-byteps-sharded": ((), BYTEPS, (*SHARDED, "--bf16")),
}


@pytest.mark.parametrize(
    ("saves", "resumes", "arguments"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.thorough] if "sharded" in name else [])
        for name, case in CASES.items()
    ],
)
def test_resume(
    train: Train,
    run_dir: Path,
    saves: tuple[str, ...],
    resumes: tuple[str, ...],
    arguments: tuple[str, ...],
) -> None:
    shared = (*arguments, *DROPOUT)
    folder = str(run_dir / "checkpoint")
    whole = train(*shared, *saves, "--save", folder, "--save-interval", "2")
    rest = train(*shared, *resumes, "--load", folder, "--ckpt-step", "2")
    assert rest.losses == whole.losses[2:]
    assert same(rest.gradients, whole.gradients[2:])
    for name, value in whole.parameters.items():
        assert torch.equal(value, rest.parameters[name]), name


SERVERS = (*BYTEPS, "--dpu-optimizer")
MEGATRON = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
OVERFLOWS = str(2**17)
MUON = ("--optimizer", "muon")
# In both layouts the vocabulary is padded to a multiple of 4.
PADDED = ("--make-vocab-size-divisible-by", "4")
SPLIT = ("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "2")


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(("--bf16",), id="bf16", marks=pytest.mark.thorough),
        # The first step overflows, and with another scale so would the first after the checkpoint.
        pytest.param(("--fp16", "--initial-loss-scale", OVERFLOWS, "--hysteresis", "1"), id="fp16"),
        pytest.param(("--bf16", *MUON, "--use-distributed-optimizer"), id="muon"),
        # What ranks hold is not the fp32 parameters, rounded: a difference was.
        pytest.param(("--bf16", "--dpu-reduce-wire-dtype", "int4"), id="int4"),
        pytest.param(("--bf16", *MUON), id="whole-muon", marks=pytest.mark.thorough),
    ],
)
def test_the_optimizer_on_the_servers_resumes(
    train: Train, run_dir: Path, dtype: tuple[str, ...]
) -> None:
    few = {"BYTEPS_KEEP_BF16_BYTES": "4096"}
    shared = (*dtype, *DROPOUT, *SERVERS)
    folder = str(run_dir / "checkpoint")
    whole = train(*shared, "--save", folder, "--save-interval", "2", environment=few)
    rest = train(*shared, "--load", folder, "--ckpt-step", "2", environment=few)
    assert rest.losses == whole.losses[2:]
    for name, value in whole.parameters.items():
        assert torch.equal(value, rest.parameters[name]), name


@pytest.mark.parametrize(
    ("saves", "resumes"),
    [
        pytest.param(SERVERS, (*MEGATRON, *SPLIT), id="from-servers"),
        pytest.param((*SERVERS, *SPLIT), MEGATRON, id="from-split", marks=pytest.mark.thorough),
        pytest.param((*MEGATRON, *SPLIT), SERVERS, id="to-servers", marks=pytest.mark.thorough),
    ],
)
def test_the_optimizer_moves(
    run_job: Callable[..., Job],
    dataset: Dataset,
    run_dir: Path,
    saves: tuple[str, ...],
    resumes: tuple[str, ...],
) -> None:
    """Between servers and Megatron's distributed optimizer, in another layout."""
    dropout = ("--hidden-dropout", "0", "--attention-dropout", "0")
    # The first layer of an MLP is saved as two tensors.
    plain = (*dropout, *PADDED, "--swiglu", "--global-batch-size", "4")
    folder = str(run_dir / "checkpoint")

    def losses(*arguments: str) -> list[float | None]:
        job = run_job("train", 2, arguments=[*data_arguments(dataset), *plain, *arguments])
        return [step.loss for step in job.result(0).steps]

    whole = losses(*saves, "--save", folder, "--save-interval", "2")
    rest = losses(*resumes, "--load", folder, "--ckpt-step", "2")
    assert len(rest) == 2
    # Without the moments, or their number of steps, the last loss differs by a hundredth.
    assert rest == pytest.approx(whole[2:], rel=1e-5)
