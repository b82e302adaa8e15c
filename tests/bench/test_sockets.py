"""Plain sockets in the pattern of a push-pull: every byte, both ways, over every flow."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bench.pushpull.sockets import Program, Sockets, build

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def program() -> Program:
    return build()


@contextmanager
def servers(program: Program, folder: Path, count: int, connections: int) -> Iterator[list[str]]:
    """So many servers; every one must end well when its connections have."""
    files = [folder / f"{index}.port" for index in range(count)]
    running = [
        subprocess.Popen([program.server, "127.0.0.1", str(file), str(connections)])
        for file in files
    ]
    try:
        deadline = time.monotonic() + LIMIT_S
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield [file.read_text().strip() for file in files]
        assert [process.wait(LIMIT_S) for process in running] == [0] * count
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.parametrize(("count", "flows"), [(1, 1), (1, 4), (3, 2)])
def test_every_byte_comes_back_in_every_round(
    program: Program, tmp_path: Path, count: int, flows: int
) -> None:
    with servers(program, tmp_path, count, flows) as places:
        sockets = Sockets(library=str(program.library), servers=places, flows=flows)
        # From one byte per server to several calls per flow, up and down again.
        for size in (7, 64 << 10, (9 << 20) + 5, 1000, 3 << 20):
            sockets.reduce(
                [torch.empty(size - 3, dtype=torch.uint8), torch.empty(3).byte()], "t", "same"
            )
        sockets.close()


def test_servers_answer_with_bytes_of_their_own(program: Program, tmp_path: Path) -> None:
    with servers(program, tmp_path, 2, 2) as places:
        sockets = Sockets(library=str(program.library), servers=places, flows=2)
        size = 1 << 20
        sockets.reduce([torch.empty(size, dtype=torch.uint8)], "t", "same")
        sockets._pulled.fill_(7)
        sockets.reduce([torch.empty(size, dtype=torch.uint8)], "t", "same")
        assert (sockets._pulled == 1).all()  # each was received, and none is left of before
        sockets.close()
