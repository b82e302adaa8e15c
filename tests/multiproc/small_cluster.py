"""A scheduler, one server, and workers without Python (byteps/tests/jobs/sum_worker.cc)."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests import native
from tests.multiproc.cluster import LOOPBACK, Spawned, clean_environment, wait_all, wait_for_file

LIMIT_S = 300.0


class SmallCluster:
    """A scheduler and one server, which outlive the workers."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.programs = native.build("byteps-server", "sum_worker")
        self.env = {
            **clean_environment(folder),
            "DMLC_PS_ROOT_URI": LOOPBACK,
            "DMLC_PS_ROOT_PORT": "0",
            "DMLC_NUM_SERVER": "1",
            "BYTEPS_KEEP": "1",
            **env,
        }
        self.processes: list[Spawned] = []
        port_file = folder / "scheduler.port"
        self._start("scheduler", "byteps-server", "--role", "scheduler", "--port-file", port_file)
        port = wait_for_file(port_file, LIMIT_S, self.processes).split()[1]
        self.env["DMLC_PS_ROOT_PORT"] = port
        self.server = self._start("server", "byteps-server", "--role", "server")

    def _start(self, title: str, program: str, *arguments: str | Path, **env: str) -> Spawned:
        command = [str(self.programs / program), *map(str, arguments)]
        process = Spawned(title, command, {**self.env, **env}, self.folder)
        self.processes.append(process)
        return process

    def start_workers(self, count: int, *arguments: str, name: str = "worker") -> list[Spawned]:
        size = str(count)
        return [
            self._start(
                f"{name} {rank}",
                "sum_worker",
                *arguments,
                RANK=str(rank),
                WORLD_SIZE=size,
                DMLC_NUM_WORKER=size,
            )
            for rank in range(count)
        ]

    def end_well(self, count: int) -> None:
        """By a job of so many workers, which ends all."""
        workers = self.start_workers(count, "--rounds", "3", name="last")
        wait_all([*workers, *self.processes[:2]], LIMIT_S)
        assert [process.wait(0) for process in [*workers, *self.processes[:2]]] == [0] * (count + 2)

    def memory(self, name: str) -> int:
        """Of the server: a line of /proc/PID/status, in bytes."""
        status = Path(f"/proc/{self.server.pid}/status").read_text()
        (kibibytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
        return int(kibibytes) * 1024


@contextmanager
def small_cluster(folder: Path, **env: str) -> Iterator[SmallCluster]:
    made = SmallCluster(folder, env)
    try:
        yield made
    finally:
        for process in made.processes:
            if process.running:
                process.send(signal.SIGKILL)
                process.wait(LIMIT_S)
