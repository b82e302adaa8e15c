"""A run that is saved under one backend goes on under the other as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training_jobs import Trained, same

Train = Callable[..., Trained]

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")


@pytest.mark.parametrize(
    ("saves", "resumes", "arguments"),
    [
        (("--use-dpu-reduce",), (), ("--bf16",)),
        ((), ("--use-dpu-reduce",), ("--ckpt-format", "torch")),
    ],
    ids=["byteps-then-all-reduce", "all-reduce-then-byteps"],
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
