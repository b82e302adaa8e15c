"""Fixtures of the Megatron tests: jobs of a few ranks, forked from a server that has
imported it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.prepare_data import Dataset
from tests import warm_python as warm
from tests.layouts.job import Job, data_arguments, forked, start_fork_server, tiny_dataset
from tests.megatron.training_jobs import Trained

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# Folder of the patched Megatron-LM: tests of another tree (a git checkout) name it here, and in
# PYTHONPATH.
TREE = Path(os.environ.get("MEGATRON_TREE", ROOT / "build" / "Megatron-LM"))


@pytest.fixture(scope="session")
def tree() -> Path:
    """The folder of the patched Megatron-LM."""
    assert (TREE / "pretrain_dpu_gpt.py").is_file(), f"{TREE} is not assembled: run `make setup`"
    return TREE


@pytest.fixture(scope="session")
def fork_server(tree: Path) -> None:
    """Imports torch and Megatron once for all ranks of all jobs."""
    start_fork_server(["tests.layouts.warm", "tests.megatron.rank_programs"])


@pytest.fixture(scope="session")
def warm_python(fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A python that need not import Megatron (warm_python.py)."""
    path, address = warm.install(tmp_path_factory.mktemp("warm"))
    with forked(warm.serve, warm.listen(address)):
        yield str(path)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A few thousand bytes of reproducible text that a small model can learn."""
    return tiny_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture
def run_job(fork_server: None, run_dir: Path) -> Callable[..., Job]:
    """Runs a program of rank_programs.py on a number of ranks, in its own folder."""
    count = 0

    def run(
        program: str, ranks: int, *, fails: bool = False, per_host: int = 1, **settings: object
    ) -> Job:
        nonlocal count
        folder = run_dir / f"job{count}-{program}"
        job = Job(
            folder, f"tests.megatron.rank_programs:{program}", ranks, settings, per_host=per_host
        )
        count += 1
        job.run(fails=fails)
        return job

    return run


@pytest.fixture(scope="session")
def plain_run(
    fork_server: None, tmp_path_factory: pytest.TempPathFactory, dataset: Dataset
) -> Callable[..., Trained]:
    """Runs Megatron's training loop with all-reduce, once per set of arguments."""

    @functools.cache
    def run(*arguments: str, ranks: int) -> Trained:
        folder = tmp_path_factory.mktemp("plain") / "job"
        settings = {"arguments": [*data_arguments(dataset), *arguments]}
        job = Job(folder, "tests.megatron.rank_programs:train", ranks, settings)
        job.run()
        return Trained.of(job)

    return run


@pytest.fixture
def train(
    run_job: Callable[..., Job], plain_run: Callable[..., Trained], dataset: Dataset
) -> Callable[..., Trained]:
    """Runs Megatron's training loop on the small dataset, and returns the records of each rank."""

    def run(*arguments: str, ranks: int = 2, **settings: object) -> Trained:
        if not settings and not {"--use-dpu-reduce", "--save", "--load"} & set(arguments):
            return plain_run(*arguments, ranks=ranks)
        job = run_job("train", ranks, arguments=[*data_arguments(dataset), *arguments], **settings)
        return Trained.of(job)

    return run


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An environment without variables that a launcher or a user may have set."""
    for name in list(os.environ):
        if name.startswith(("DMLC_", "BYTEPS_", "MEGATRON_CPU")):
            monkeypatch.delenv(name)
    yield monkeypatch
