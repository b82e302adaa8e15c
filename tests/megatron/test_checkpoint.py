"""A run that is saved under one backend goes on under the other as if nothing had happened.

With two ranks all sums are the same to the last bit, so that the run that goes on must equal the
one that was never interrupted, whichever backend that had.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training_jobs import Trained, same

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


@pytest.mark.parametrize(("saves", "resumes", "arguments"), CASES.values(), ids=CASES)
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


@pytest.mark.parametrize(
    ("saves", "resumes"),
    [(SERVERS, SERVERS), (SERVERS, MEGATRON), (MEGATRON, SERVERS)],
    ids=["servers", "servers-then-megatron", "megatron-then-servers"],
)
def test_resume_with_the_optimizer_on_the_servers(
    train: Train, run_dir: Path, saves: tuple[str, ...], resumes: tuple[str, ...]
) -> None:
    """To the same bits, or where Megatron's optimizer is one of the two as near as it is."""
    shared = ("--bf16", *DROPOUT)
    folder = str(run_dir / "checkpoint")
    whole = train(*shared, *saves, "--save", folder, "--save-interval", "2")
    rest = train(*shared, *resumes, "--load", folder, "--ckpt-step", "2")
    if saves == resumes:
        assert rest.losses == whole.losses[2:]
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-5)
    for name, value in whole.parameters.items():
        if saves == resumes:
            assert torch.equal(value, rest.parameters[name]), name
        # Without the moments, or their number of steps, a step of 1e-2 would go elsewhere.
        near = {"rtol": 2**-7, "atol": 3e-4}
        torch.testing.assert_close(rest.parameters[name], value, **near)
