"""Tests of verl's trainer through BytePS, on a tiny model.

Only `make test-rl` runs them, in build/venv-rl.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.trainkit.rl_settings import ENVIRONMENTS

# These variables must be set before verl is imported.
os.environ.update({**ENVIRONMENTS["cpu"], "HF_HUB_OFFLINE": "1"})
# Bytecode makes processes with so many imports a third faster.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base model of the example."""
    from scripts.trainkit import rl_task

    return rl_task.make_model(tmp_path_factory.mktemp("base"))
