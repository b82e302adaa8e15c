"""A scheduler, servers and workers (sum_worker) without Python."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.multiproc.cluster import LOOPBACK, Spawned, clean_environment, wait_all, wait_for_file


class SumCluster:
    """A context manager that starts the scheduler and all servers, and kills what is left at its
    end.

    The scheduler is the first process, servers are the next ones.
    """

    def __init__(
        self,
        folder: Path,
        programs: Path,
        env: Mapping[str, str],
        *,
        servers: int = 1,
        prefix: Sequence[str] = (),
        limit_s: float = 300.0,
    ) -> None:
        """
        Args:
            folder: folder for logs.
            programs: folder of byteps-server and sum_worker.
            env: settings of all processes.
            servers: number of servers.
            prefix: words before each command, such as those of valgrind.
            limit_s: limit in seconds for each wait.
        """
        self.folder = folder
        self.processes: list[Spawned] = []
        self._programs = programs
        self._servers = servers
        self._prefix = prefix
        self._limit_s = limit_s
        self._env = {
            **clean_environment(folder),
            "DMLC_PS_ROOT_URI": LOOPBACK,
            "DMLC_PS_ROOT_PORT": "0",
            "DMLC_NUM_SERVER": str(servers),
            **env,
        }

    def __enter__(self) -> Self:
        port_file = self.folder / "scheduler.port"
        role = ("--role", "scheduler", "--port-file", str(port_file))
        self._start("scheduler", "byteps-server", *role)
        port = wait_for_file(port_file, self._limit_s, self.processes).split()[1]
        self._env["DMLC_PS_ROOT_PORT"] = port
        for number in range(self._servers):
            self._start(f"server {number}", "byteps-server", "--role", "server")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.running:
                process.send(signal.SIGKILL)
                process.wait(self._limit_s)

    @property
    def server(self) -> Spawned:
        """The first server."""
        return self.processes[1]

    def start_worker(self, rank: int, size: int, *arguments: str, name: str = "worker") -> Spawned:
        """Start sum_worker as rank `rank` of `size` ranks."""
        env = {"RANK": str(rank), "WORLD_SIZE": str(size), "DMLC_NUM_WORKER": str(size)}
        return self._start(f"{name} {rank}", "sum_worker", *arguments, **env)

    def start_workers(self, size: int, *arguments: str, name: str = "worker") -> list[Spawned]:
        return [self.start_worker(rank, size, *arguments, name=name) for rank in range(size)]

    def finish(self) -> None:
        """Wait for all processes, and require exit status 0."""
        wait_all(self.processes, self._limit_s)
        bad = {p.title: p.wait(0) for p in self.processes if p.wait(0) != 0}
        assert not bad, f"exit status: {bad}"

    def _start(self, title: str, program: str, *arguments: str, **env: str) -> Spawned:
        command = [*self._prefix, str(self._programs / program), *arguments]
        process = Spawned(title, command, {**self._env, **env}, self.folder)
        self.processes.append(process)
        return process
