"""A server that stands still, as under SIGSTOP or in a paused VM, and goes on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.multiproc.cluster import wait_all
from tests.multiproc.small_cluster import LIMIT_S, small_cluster

OP_TIMEOUT_S = 6.0
PAUSE_S = 8.0
"""Longer than that, and shorter than workers wait for a server that does not answer: 5 s more."""


@pytest.mark.thorough
def test_a_server_that_stood_still_blames_nobody(run_dir: Path) -> None:
    """Rounds whose deadline has passed meanwhile are completed by what lies in its sockets."""
    settings = {
        "BYTEPS_OP_TIMEOUT_S": str(OP_TIMEOUT_S),
        "BYTEPS_PEER_TIMEOUT_S": "60",
        "BYTEPS_LOG_LEVEL": "DEBUG",
    }
    with small_cluster(run_dir, **settings) as job:
        arguments = ["--bytes", "40000000", "--tensors", "3", "--rounds", "40"]
        workers = job.start_workers(2, *arguments)
        deadline = time.monotonic() + LIMIT_S
        while not all("PUSH 'tensor.0'" in worker.text for worker in workers):  # until it sums
            assert time.monotonic() < deadline
            time.sleep(0.01)
        job.server.send(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        job.server.send(signal.SIGCONT)
        wait_all(workers, LIMIT_S)
        assert [worker.wait(0) for worker in workers] == [0, 0]
        wait_all(job.processes[:2], LIMIT_S)
        assert "stood still for" in job.server.text
