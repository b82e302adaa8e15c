"""A gradient that is no number: found before it is summed, summed like any other, or skipped."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from scripts.prepare_data import Dataset
from tests.layouts.data import data_arguments
from tests.layouts.job import Job

RunJob = Callable[..., Job]

BACKENDS = {"byteps": ("--use-dpu-reduce",), "all-reduce": ()}


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_the_check_ends_the_job(run_job: RunJob, dataset: Dataset, backend: tuple[str]) -> None:
    """The rank that finds it says so; the other one does not wait for it."""
    arguments = [*data_arguments(dataset), *backend]
    job = run_job("train_poisoned", 2, fails=True, arguments=arguments)
    assert "found NaN in local grad norm for bucket #0" in job.log_of(1).read_text()
    assert "found NaN" not in job.log_of(0).read_text()


def test_without_the_check_both_backends_sum_it(run_job: RunJob, dataset: Dataset) -> None:
    """As with all-reduce, the sum is no number in the same element, on every rank, and no other."""
    arguments = [*data_arguments(dataset), "--no-check-for-nan-in-loss-and-grad"]
    where = []
    for backend in BACKENDS.values():
        job = run_job("train_poisoned", 2, arguments=[*arguments, *backend])
        for rank in range(2):
            (total,) = job.result(rank).steps[1].sums.values()
            where.append(torch.isnan(total.result).nonzero().tolist())
    assert where == [[[5]]] * 4


def test_with_the_optimizer_on_the_servers_the_step_is_skipped(
    run_job: RunJob, dataset: Dataset
) -> None:
    """By all ranks; training goes on, and they agree to the bit, whether servers try steps, which
    are clipped before and after, or wait."""
    arguments = [*data_arguments(dataset), "--no-check-for-nan-in-loss-and-grad"]
    arguments += ["--use-dpu-reduce", "--dpu-optimizer", "--overlap-grad-reduce"]
    found = []
    for clip in ("speculate", "wait"):
        job = run_job("train_poisoned", 2, arguments=[*arguments, "--dpu-optimizer-clip", clip])
        for rank in range(2):
            found.append(job.result(rank).parameters)
            norms = [step.grad_norm for step in job.result(rank).steps]
            is_none = [norm is None or math.isnan(norm) for norm in norms]
            assert is_none == [False, True, False, False]
        logs = job.log_of(0).read_text() + job.log_of(1).read_text()
        assert "number of skipped iterations:   1" in logs
    for name, value in found[0].items():
        assert torch.isfinite(value).all()
        assert all(torch.equal(value, other[name]) for other in found), name
