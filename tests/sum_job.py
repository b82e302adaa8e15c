"""A job of native programs in which every worker checks every sum."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.children import Late, Spawned, last_lines

LIMIT_S = 240.0
"""For a machine on which others work as well, and a guest whose CPU is emulated."""
BYTES = 1 << 20
"""Of each of a worker's two tensors."""


class SumJob:
    """Processes by title. The one who starts it ends it by `finish` or `kill`."""

    def __init__(self, programs: Path, folder: Path) -> None:
        """
        Args:
            programs: the folder of byteps-server and sum_worker.
            folder: for what the processes write.
        """
        self._programs = programs
        self._folder = folder
        self.processes: dict[str, Spawned] = {}

    def server_command(self, role: str) -> list[str]:
        """Of a scheduler or a server."""
        return [str(self._programs / "byteps-server"), "--role", role]

    def worker_command(self, rounds: int) -> list[str]:
        """Of a worker that rests a moment after each round."""
        program = str(self._programs / "sum_worker")
        sizes = ["--rounds", str(rounds), "--bytes", str(BYTES)]
        return [program, "--pause-ms", "5", "--tensors", "2", *sizes]

    def spawn(self, title: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a process."""
        self.processes[title] = Spawned(title, list(command), dict(env), self._folder)

    def demand_running(self) -> None:
        """No process has ended."""
        for process in self.processes.values():
            assert process.running, process.text

    def finish(self) -> None:
        """All sums were right, and every process ended well."""
        deadline = time.monotonic() + LIMIT_S
        for title, process in self.processes.items():
            try:
                assert process.wait(deadline - time.monotonic()) == 0, last_lines(process.log)
            except Late as error:
                raise AssertionError(f"{title}: {error}") from None

    def kill(self) -> None:
        """End what still runs."""
        for process in self.processes.values():
            process.kill()
