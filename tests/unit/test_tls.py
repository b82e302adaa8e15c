"""Encrypted connections between two sockets (byteps/tests/net/tls)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import native

LIMIT_S = 240


def test_connections(run_dir: Path) -> None:
    program = native.build("tls_test") / "tls_test"
    log = run_dir / "tls_test.log"
    with log.open("wb") as out:
        ended = subprocess.run(
            [program], stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False
        )
    assert ended.returncode == 0
    assert "[  PASSED  ] 0 tests" not in log.read_text(errors="replace")
