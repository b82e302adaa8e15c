"""Fixtures of tests that need no cluster."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest

from scripts.children import captured, server_executable

LIMIT_S = 30.0


@pytest.fixture(scope="session")
def byteps_server() -> str:
    """Path of the executable: in the folder of this Python, otherwise from PATH."""
    return server_executable()


@pytest.fixture
def ask(byteps_server: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs byteps-server with these arguments and only these of our variables."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DMLC_", "BYTEPS_", "PS_")) and "RANK" not in name
        }
        env.pop("WORLD_SIZE", None)
        env.pop("LOCAL_WORLD_SIZE", None)
        return captured([byteps_server, *arguments], LIMIT_S, env={**env, **variables})

    return run
