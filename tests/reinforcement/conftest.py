"""Tests of verl's workers on tiny models; ranks are forked from a server that has imported all
that they need.

By `make test-rl` alone, in build/venv-rl.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "Megatron-LM"
FOLDERS = ("scripts", "integrations/hf", "integrations/rl")
sys.path[:0] = [str(TREE), *(str(ROOT / name) for name in FOLDERS)]

from megatron_byteps_rl.devices import ENVIRONMENTS  # noqa: E402

# Before verl is imported, here or in the fork server.
os.environ.update({**ENVIRONMENTS["cpu"]} | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})

from layouts.job import start_fork_server  # noqa: E402
from layouts.reinforcement.runs import PROGRAMS  # noqa: E402


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
    from layouts.reinforcement import rewards

    return rewards.write(model, tmp_path_factory.mktemp("reward") / "model")
