"""Each part of the C++ code alone (byteps/tests/*/*_test.cc), suite by suite."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests import native

BYTEPS = Path(__file__).resolve().parents[2] / "byteps"
PROGRAM = re.compile(r"add_executable\(unit_test\s([^)]+)\)")
"""In cmake/Tests.cmake: its sources."""


def _suites(text: str) -> list[str]:
    """Of a source, by the names that their tests have."""
    plain = re.findall(r"^TEST(?:_F)?\((\w+),", text, re.M)
    of_values = re.findall(r"^INSTANTIATE_TEST_SUITE_P\(\s*(\w+),\s*(\w+),", text, re.M)
    return plain + [f"{values}/{suite}" for values, suite in of_values]


SUITES = sorted(
    {
        suite
        for source in PROGRAM.findall((BYTEPS / "cmake/Tests.cmake").read_text())[0].split()
        if source.endswith("_test.cc")
        for suite in _suites((BYTEPS / source).read_text())
    }
)
LIMIT_S = 240


@pytest.fixture(scope="session")
def unit_test() -> Path:
    return native.build("unit_test") / "unit_test"


def test_every_suite_is_run(unit_test: Path) -> None:
    listed = subprocess.run(
        [unit_test, "--gtest_list_tests"], capture_output=True, text=True, check=True
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
def test_suite(unit_test: Path, run_dir: Path, suite: str) -> None:
    log = run_dir / "unit_test.log"
    with log.open("wb") as out:
        ended = subprocess.run(
            [unit_test, f"--gtest_filter={suite}.*"],
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    assert ended.returncode == 0
    assert "[  PASSED  ] 0 tests" not in log.read_text(errors="replace")
