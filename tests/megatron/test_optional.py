"""BytePS is optional: without it, or without the flag, Megatron is what it was."""

from __future__ import annotations

from collections.abc import Callable

from scripts.prepare_data import Dataset
from tests.layouts.job import Job
from tests.megatron.training_jobs import Trained, assert_same_run


def test_trains_where_byteps_is_absent(train: Callable[..., Trained]) -> None:
    assert_same_run(train(hide_byteps=True), train())


def test_one_clear_error_where_byteps_is_absent(
    run_job: Callable[..., Job], dataset: Dataset
) -> None:
    arguments = ["--data-path", str(dataset.prefix), "--use-dpu-reduce"]
    job = run_job("train", 2, fails=True, arguments=arguments, hide_byteps=True)
    for rank in range(2):
        text = job.log_of(rank).read_text()
        assert "RuntimeError: --use-dpu-reduce needs the package byteps" in text
        assert "make setup" in text
        assert "initialized tensor model parallel" not in text, "refused before the set-up"


def test_without_the_flag_byteps_is_not_touched(train: Callable[..., Trained]) -> None:
    run = train()
    assert run.job.result(0).byteps_imported is False
    assert "BytePS" not in run.job.log_of(0).read_text()
