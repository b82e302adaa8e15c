"""The worker over servers that a script plays (byteps/tests/engine), suite by suite."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import native
import pytest

SOURCES = Path(__file__).resolve().parents[2] / "byteps/tests/engine"
SUITES = sorted(
    {
        suite
        for source in SOURCES.glob("*_test.cc")
        for suite in re.findall(r"^TEST(?:_F)?\((\w+),", source.read_text(), re.MULTILINE)
    }
)
LIMIT_S = 240


@pytest.fixture(scope="session")
def engine_test() -> Path:
    return native.build("engine_test") / "engine_test"


def test_every_suite_is_run(engine_test: Path) -> None:
    listed = subprocess.run(
        [engine_test, "--gtest_list_tests"], capture_output=True, text=True, check=True
    )
    found = {line.removesuffix(".") for line in listed.stdout.splitlines() if line.endswith(".")}
    assert found == set(SUITES)


@pytest.mark.parametrize(
    "suite",
    [
        pytest.param(suite, marks=[pytest.mark.breaks_invariant] if suite == "Invariant" else [])
        for suite in SUITES
    ],
)
def test_suite(engine_test: Path, run_dir: Path, suite: str) -> None:
    log = run_dir / "engine_test.log"
    with log.open("wb") as out:
        ended = subprocess.run(
            [engine_test, f"--gtest_filter={suite}.*"],
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    assert ended.returncode == 0
    assert "[  PASSED  ] 0 tests" not in log.read_text(errors="replace")
