"""What servers keep in memory, and what they say when there is none."""

from __future__ import annotations

import re
import resource
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import native
from cluster import LOOPBACK, Spawned, clean_environment, wait_all, wait_for_file

LIMIT_S = 300.0
MIB = 1 << 20


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
def cluster(folder: Path, **env: str) -> Iterator[SmallCluster]:
    made = SmallCluster(folder, env)
    try:
        yield made
    finally:
        for process in made.processes:
            if process.running:
                process.send(signal.SIGKILL)
                process.wait(LIMIT_S)


def test_values_that_nobody_declared_take_no_memory(run_dir: Path) -> None:
    """They are refused by name, and the server has never had room for them."""
    size = str(256 * MIB)
    with cluster(run_dir, BYTEPS_PARTITION_BYTES=size, BYTEPS_MIN_PARTITION_BYTES=size) as job:
        arguments = ["--bytes", size, "--tensors", "1", "--rounds", "1", "--fail-in", "0"]
        workers = job.start_workers(1, *arguments)
        wait_all(workers, LIMIT_S)
        assert workers[0].wait(0) == 0
        assert "which nobody declared" in workers[0].text
        assert job.memory("VmHWM") < 128 * MIB


def test_a_server_without_memory_says_what_it_wanted(run_dir: Path) -> None:
    """The operation fails, and the server serves the next job, which wants less."""
    size = 256 * MIB
    partition = {f"BYTEPS_{name}_BYTES": str(size) for name in ("PARTITION", "MIN_PARTITION")}
    with cluster(run_dir, **partition, MALLOC_ARENA_MAX="1") as job:
        limit = job.memory("VmSize") + size // 2
        resource.prlimit(job.server.pid, resource.RLIMIT_AS, (limit, limit))
        arguments = ["--bytes", str(size), "--tensors", "1", "--rounds", "1"]
        workers = job.start_workers(1, *arguments)
        wait_all(workers, LIMIT_S)
        assert workers[0].wait(0) == 1
        told = (
            rf"server 0 is out of memory: it wanted {size} bytes for a push of 'tensor\.0' from "
            r"worker 0, partition 0; take more servers"
        )
        assert re.search(told, workers[0].text), workers[0].text
        assert job.server.running
        job.end_well(2)


def test_a_failed_operation_leaves_nothing_behind(run_dir: Path) -> None:
    """One rank fails alone. All go on, and the server ends as large as it was."""
    rounds = 2000
    with cluster(run_dir, BYTEPS_RECEIVE_POOL_BYTES=str(16 * MIB)) as job:
        arguments = ["--bytes", "400000", "--tensors", "2", "--rounds", str(rounds)]
        workers = job.start_workers(2, *arguments, "--fail-in", "5")
        wait_all(workers, LIMIT_S)
        assert [worker.wait(0) for worker in workers] == [0, 0]
        assert "which nobody declared" in workers[0].text
        assert "worker 0 gave up round 5" in workers[1].text
        # byteps.sizing: three times what is summed, the pool, and 256 MiB for the process.
        assert job.memory("VmHWM") < 3 * 2 * 400_000 + 16 * MIB + 256 * MIB
        job.end_well(2)
