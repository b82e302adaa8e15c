"""A job over RDMA between two machines: two guests on a cable."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.rdma.relay import REPOSITORY
from tests.rdma.vm.bytecode import compiled
from tests.rdma.vm.guest import Guest, Link, missing_tool

LIMIT_S = 390.0


@pytest.fixture
def guests(run_dir: Path) -> Iterator[list[Guest]]:
    lacking = missing_tool()
    if lacking is not None:
        pytest.skip(lacking)
    program = str(REPOSITORY / "tests/rdma/two_hosts.py")
    bytecode = compiled(("byteps.torch",))
    with ExitStack() as stack:
        started = []
        for number in (1, 2):
            folder = run_dir / f"guest{number}"
            command = [sys.executable, program, str(folder), str(number)]
            cable = Link(path=run_dir / "cable", listens=number == 1)
            env = {"PATH": os.environ["PATH"], **bytecode}
            guest = Guest(folder, command, number=number, link=cable, memory="3G", env=env)
            started.append(stack.enter_context(guest).plugged_in(cable))
        yield started


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_jobs_between_machines(guests: list[Guest]) -> None:
    """Two that end well; then the second machine dies, and all on the first say so in time."""
    deadline = time.monotonic() + LIMIT_S
    first, second = guests
    status = first.wait(max(1.0, deadline - time.monotonic()))
    assert status == 0, "\n".join(guest.last_words(60) for guest in guests)
    while second.running and time.monotonic() < deadline:
        time.sleep(0.1)
    assert second.status is None, second.last_words()
    folder = first.folder / "job9003"
    lost = re.compile(r"(worker 1|server [01])\b.*was lost: ")
    error = (folder / "worker.log").read_text().strip().splitlines()[-1]
    assert "BytePSError" in error, error
    assert lost.search(error), error
    for node in ("scheduler", "server"):
        assert lost.search((folder / f"{node}.log").read_text())
