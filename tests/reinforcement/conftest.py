"""Tests of verl's workers on tiny models; ranks are forked from a server that has imported all
that they need.

By `make test-rl` alone, in build/venv-rl.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_byteps_rl.devices import ENVIRONMENTS

# Before verl is imported, here or in the fork server.
os.environ.update({**ENVIRONMENTS["cpu"]} | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})

from tests.layouts.job import start_fork_server
from tests.layouts.reinforcement.runs import PROGRAMS


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Imports torch, Megatron, its bridge, transformers and verl once for all ranks."""
    start_fork_server([PROGRAMS])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model of the example."""
    from megatron_byteps_rl import task

    return task.make_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def reward_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model that was not trained."""
    from tests.layouts.reinforcement import rewards

    return rewards.write(model, tmp_path_factory.mktemp("reward") / "model")
