"""A short run of each fuzzer: its corpus, which holds whatever was found, and some more."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.fuzz import TARGETS, fuzz
from tests import native

RUNS = {"membership": 1_000, "server": 1_000}
"""Those that start threads are slower."""
OTHER_RUNS = 30_000


@pytest.fixture(scope="session")
def fuzzers() -> Path:
    return native.build("fuzzers", sanitize="address")


@pytest.mark.sanitized_by_address
@pytest.mark.requires("clang")
@pytest.mark.parametrize("target", TARGETS)
def test_target(fuzzers: Path, target: str) -> None:
    runs = RUNS.get(target, OTHER_RUNS)
    assert fuzz(fuzzers, target, runs, seed=1)["executions"] >= runs
