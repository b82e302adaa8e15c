"""Tests with tiny Hugging Face models, which are made here.

Ranks are forked from a server that has imported all they need. Only `make test-hf` runs these
tests, in build/venv-hf.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts.hugging_face.runs import PROGRAMS
from tests.layouts.job import data_arguments, start_fork_server, tiny_dataset


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Import torch, Megatron, its bridge and transformers once for all ranks of all jobs."""
    start_fork_server([PROGRAMS])


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments with a small dataset of bytes, all of them tokens of the tiny models."""
    return data_arguments(tiny_dataset(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> Path:
    """Folder for tiny models; see layouts.hugging_face.runs.make_model."""
    return tmp_path_factory.mktemp("models")
