"""What every transport promises of a link, over RDMA; tests/unit/test_connections.py tries TCP.

Both ends are in one process (byteps/tests/net/link/contract).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import native
from tests.rdma.relay import ADDRESS_VARIABLE
from tests.rdma.transports import Transport

LIMIT_S = 400


@pytest.mark.transports("rdma")
def test_contract(transport: Transport, run_dir: Path) -> None:
    folder = native.FOLDER if ADDRESS_VARIABLE in os.environ else native.build("connection_test")
    log = run_dir / "contract.log"
    with log.open("wb") as out:
        ended = subprocess.run(
            [folder / "connection_test", "--gtest_filter=*Contract.*/Rdma"],
            env={**os.environ, **transport.env, "CONTRACT_RDMA_ADDRESS": transport.host},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    assert ended.returncode == 0
    assert "[  PASSED  ] 0 tests" not in log.read_text(errors="replace")
