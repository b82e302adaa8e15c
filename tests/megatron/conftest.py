"""Fixtures of the Megatron tests: jobs of a few ranks, forked from a server that imported it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# Where the patched Megatron-LM is: tests of another tree (a git checkout) name it here.
TREE = Path(os.environ.get("MEGATRON_TREE", ROOT / "build" / "Megatron-LM"))

sys.path[:0] = [str(HERE), str(TREE), str(ROOT / "scripts")]

from training_jobs import Job, Trained, start_fork_server  # noqa: E402

from prepare_data import Dataset, prepare  # noqa: E402


@pytest.fixture(scope="session")
def tree() -> Path:
    """The patched Megatron-LM."""
    assert (TREE / "pretrain_dpu_gpt.py").is_file(), f"{TREE} is not assembled: run `make setup`"
    return TREE


@pytest.fixture(scope="session")
def fork_server(tree: Path) -> None:
    """Imports torch and Megatron once for all ranks of all jobs."""
    start_fork_server()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A few thousand bytes of text that a computer can reproduce and a small model can learn."""
    folder = tmp_path_factory.mktemp("data")
    # Several documents: Megatron splits them between training and validation.
    sources = [folder / f"{number}.txt" for number in range(10)]
    for number, source in enumerate(sources):
        lines = (f"{number} times {n} is {number * n}.\n" for n in range(60))
        source.write_text("".join(lines))
    return prepare(sources, folder, 1 << 20)


@pytest.fixture
def run_job(fork_server: None, run_dir: Path) -> Callable[..., Job]:
    """Runs a program of rank_programs.py on a number of ranks, in a folder of its own."""
    count = 0

    def run(program: str, ranks: int, *, fails: bool = False, **settings: object) -> Job:
        nonlocal count
        job = Job(run_dir / f"job{count}-{program}", program, ranks, settings)
        count += 1
        job.run(fails=fails)
        return job

    return run


@pytest.fixture
def train(run_job: Callable[..., Job], dataset: Dataset) -> Callable[..., Trained]:
    """Runs Megatron's training loop on the small dataset and returns what each rank saw."""

    def run(*arguments: str, ranks: int = 2, **settings: object) -> Trained:
        job = run_job("train", ranks, arguments=[*_data(dataset), *arguments], **settings)
        return Trained.of(job)

    return run


def _data(dataset: Dataset) -> Sequence[str]:
    cache = dataset.prefix.parent / "cache"
    return ["--data-path", str(dataset.prefix), "--data-cache-path", str(cache)]


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """None of the variables that a launcher or a user may have set."""
    for name in list(os.environ):
        if name.startswith(("DMLC_", "BYTEPS_", "MEGATRON_CPU")):
            monkeypatch.delenv(name)
    yield monkeypatch
