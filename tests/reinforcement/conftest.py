"""Tests of verl's trainer through BytePS, on a tiny model.

By `make test-rl` alone, in build/venv-rl.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.trainkit.rl_settings import ENVIRONMENTS

# Before verl is imported.
os.environ.update({**ENVIRONMENTS["cpu"], "HF_HUB_OFFLINE": "1"})
# Processes that import as much as these do it a third faster from compiled files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model of the example."""
    from scripts.trainkit import rl_task

    return rl_task.make_model(tmp_path_factory.mktemp("base"))
