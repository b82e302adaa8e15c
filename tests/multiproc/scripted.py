"""Clusters that the scripts start: scheduler.sh, server.sh and worker.sh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from scripts.children import captured
from tests.multiproc.cluster import (
    END_S,
    HERE,
    LOOPBACK,
    REPOSITORY,
    START_S,
    Late,
    Spawned,
    clean_environment,
    processes_with,
    server_executable,
    wait_for_file,
)

SCRIPTS = REPOSITORY / "scripts"
MARK = "SCRIPTS_TEST_MARK"
SCRIPTED = (str(HERE / "programs/keep.py"), "scripted")
GOOD = {
    "scheduler": ["--host", LOOPBACK, "--port", "9", "--workers", "1", "--servers", "1"],
    "server": ["--scheduler", f"{LOOPBACK}:9", "--workers", "1", "--servers", "1"],
    "worker": ["--scheduler", f"{LOOPBACK}:9", "--servers", "1", "--", "script.py"],
}


def environment(folder: Path) -> dict[str, str]:
    """Return an environment whose PATH starts with this Python's folder, where scripts find the
    tested programs."""
    env = clean_environment(folder)
    beside = f"{Path(sys.executable).parent}:{Path(server_executable()).parent}"
    return {**env, "PATH": f"{beside}:{env['PATH']}"}


def ask(run_dir: Path, role: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPTS / f"{role}.sh"), *arguments]
    return captured(command, START_S, env=environment(run_dir))


class Scripted:
    """A cluster that the three scripts start. All its processes have a mark in their
    environment."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        self.python = python
        """Python of the ranks."""
        self.mark = uuid.uuid4().hex
        self.port = 0
        self.started: list[Spawned] = []

    def start(self, role: str, *arguments: str, env: Mapping[str, str] | None = None) -> Spawned:
        own = {MARK: self.mark, "PYTHON_EXEC": self.python}
        full = {**environment(self.folder), **own, **(env or {})}
        command = ["bash", str(SCRIPTS / f"{role}.sh"), *arguments]
        title = f"{role} script {len(self.started)}"
        self.started.append(Spawned(title, command, full, self.folder))
        return self.started[-1]

    def start_nodes(
        self, workers: int, servers: int, env: Mapping[str, str] | None = None
    ) -> tuple[Spawned, Spawned]:
        port_file = self.folder / "port"
        sizes = ["--workers", str(workers), "--servers", str(servers)]
        where = ["--host", LOOPBACK, "--port", "0", "--port-file", str(port_file)]
        scheduler = self.start("scheduler", *where, *sizes, env=env)
        self.port = int(wait_for_file(port_file, START_S, [scheduler]).split()[1])
        address = ["--scheduler", f"{LOOPBACK}:{self.port}"]
        server = self.start("server", *address, *sizes, "--instances", str(servers), env=env)
        return scheduler, server

    def start_worker(self, servers: int, ranks: int, mode: str) -> Spawned:
        return self.start(
            "worker",
            *("--scheduler", f"{LOOPBACK}:{self.port}", "--servers", str(servers)),
            *("--nnodes", "1", "--nproc-per-node", str(ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LOOPBACK}:0"),
            *("--", *SCRIPTED, mode, str(self.folder)),
        )

    def wait_for_instances(self, number: int) -> list[int]:
        """Return the pids of the servers that server.sh has started: from then on it handles
        signals.

        Counting processes with the mark is not enough: just after a fork there are two of the
        script, and it handles no signal before it has read its settings.
        """
        deadline = time.monotonic() + START_S
        while True:
            instances = [
                pid
                for pid, command in processes_with(MARK, self.mark).items()
                if "--role server" in command and "server.sh" not in command
            ]
            if len(instances) == number:
                return instances
            if time.monotonic() > deadline:
                raise Late(f"{len(instances)} of {number} servers run after {START_S:g} s")
            time.sleep(0.02)

    def demand_no_process(self) -> None:
        deadline = time.monotonic() + END_S
        while left := processes_with(MARK, self.mark):
            if time.monotonic() > deadline:
                raise Late(f"processes still run after {END_S:g} s: {left}")
            time.sleep(0.05)

    def close(self) -> None:
        for process in self.started:
            if process.running:
                process.send(signal.SIGKILL)
                process.wait(END_S)
        for pid in processes_with(MARK, self.mark):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def scripted(run_dir: Path, warm_python: str) -> Iterator[Scripted]:
    made = Scripted(run_dir, warm_python)
    yield made
    made.close()


def checks(said: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in said.stdout.splitlines() if line.startswith(("ok ", "WRONG "))]
