"""Both ends of TCP connections in one process, with a relay between
(byteps/tests/net/tcp/connection)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import native

SUITES = ("BestOf", "ConnectionOverNics", "Contract", "Greeting", "Refusal", "Sending", "VanInbox")
PARTS = [*(f"{suite}.*" for suite in SUITES if suite != "Greeting")]
PARTS += ["Greeting.*/Plain", "Greeting.*/Tls"]  # each waits for seconds
LIMIT_S = 500


@pytest.fixture(scope="module")
def connection_test() -> Path:
    return native.build("connection_test") / "connection_test"


def run(program: Path, part: str, log: Path, *, thorough: bool = False) -> str:
    env = {**os.environ, "CONNECTION_TEST_THOROUGH": "1"} if thorough else dict(os.environ)
    with log.open("wb") as out:
        ended = subprocess.run(
            [program, f"--gtest_filter=*{part}"],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    assert ended.returncode == 0
    return log.read_text(errors="replace")


def test_every_suite_is_run(connection_test: Path) -> None:
    listed = subprocess.run(
        [connection_test, "--gtest_list_tests"], capture_output=True, text=True, check=True
    )
    lines = [line.split()[0] for line in listed.stdout.splitlines() if not line.startswith(" ")]
    found = {line.removesuffix(".").rpartition("/")[2] for line in lines if line.endswith(".")}
    assert found == set(SUITES)


@pytest.mark.parametrize("part", PARTS)
def test_part(connection_test: Path, run_dir: Path, part: str) -> None:
    assert "[  PASSED  ] 0 tests" not in run(connection_test, part, run_dir / "test.log")


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT_S)
def test_damage_at_every_place(connection_test: Path, run_dir: Path) -> None:
    """Every bit of a greeting is flipped once; at each byte it is cut, held, or gets one more."""
    run(connection_test, "Greeting.*", run_dir / "test.log", thorough=True)


def test_encryption(run_dir: Path) -> None:
    """Between two sockets, without a job (byteps/tests/net/tls)."""
    program = native.build("tls_test") / "tls_test"
    assert "[  PASSED  ] 0 tests" not in run(program, "*", run_dir / "test.log")
