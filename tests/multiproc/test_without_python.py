"""Jobs without Python: memory of servers, servers that are stopped, settings of copies, and a
broken invariant (base/invariant.h), which ends the job."""

from __future__ import annotations

import re
import resource
import signal
import time
from pathlib import Path

import pytest

from scripts.children import captured
from tests import native
from tests.multiproc.cluster import LOOPBACK, clean_environment, wait_all
from tests.multiproc.sum_cluster import SumCluster

LIMIT_S = 300.0


class SmallCluster(SumCluster):
    """A scheduler and a server, which outlive the workers."""

    def __init__(self, folder: Path, **env: str) -> None:
        programs = native.build("byteps-server", "sum_worker")
        super().__init__(folder, programs, {"BYTEPS_KEEP": "1", **env}, limit_s=LIMIT_S)

    def end_well(self, count: int) -> None:
        """End everything with a job of `count` workers."""
        workers = self.start_workers(count, "--rounds", "3", name="last")
        wait_all([*workers, *self.processes[:2]], LIMIT_S)
        assert [process.wait(0) for process in [*workers, *self.processes[:2]]] == [0] * (count + 2)

    def memory(self, name: str) -> int:
        """Return a line of the server's /proc/PID/status, in bytes."""
        status = Path(f"/proc/{self.server.pid}/status").read_text()
        (kibibytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
        return int(kibibytes) * 1024


# Memory of servers, and their errors when memory is insufficient.


MIB = 1 << 20

LARGE = 256 * MIB
ONE_PARTITION = {f"BYTEPS_{name}_BYTES": str(LARGE) for name in ("PARTITION", "MIN_PARTITION")}


def test_values_that_nobody_declared_take_no_memory(run_dir: Path) -> None:
    """Undeclared values are refused by name, and the server never allocates memory for them."""
    with SmallCluster(run_dir, **ONE_PARTITION) as job:
        arguments = ["--bytes", str(LARGE), "--tensors", "1", "--rounds", "1", "--fail-in", "0"]
        workers = job.start_workers(1, *arguments)
        wait_all(workers, LIMIT_S)
        assert workers[0].wait(0) == 0
        assert "which nobody declared" in workers[0].text
        assert job.memory("VmHWM") < 128 * MIB


def test_a_server_without_memory_says_what_it_wanted(run_dir: Path) -> None:
    """The operation fails, and the server serves the next job, which needs less."""
    with SmallCluster(run_dir, **ONE_PARTITION, MALLOC_ARENA_MAX="1") as job:
        limit = job.memory("VmSize") + LARGE // 2
        resource.prlimit(job.server.pid, resource.RLIMIT_AS, (limit, limit))
        arguments = ["--bytes", str(LARGE), "--tensors", "1", "--rounds", "1"]
        workers = job.start_workers(1, *arguments)
        wait_all(workers, LIMIT_S)
        assert workers[0].wait(0) == 1
        error = (
            rf"server 0 is out of memory: it wanted {LARGE} bytes for a push of 'tensor\.0' from "
            r"worker 0, partition 0; \d+ of \d+ bytes are free \(ulimit -v\); take more servers"
        )
        assert re.search(error, workers[0].text), workers[0].text
        assert job.server.running
        job.end_well(2)


def test_a_failed_operation_leaves_no_memory_behind(run_dir: Path) -> None:
    """If one rank's operation fails, all ranks continue, and the server's memory does not grow."""
    rounds = 2000
    with SmallCluster(run_dir, BYTEPS_RECEIVE_POOL_BYTES=str(16 * MIB)) as job:
        arguments = ["--bytes", "400000", "--tensors", "2", "--rounds", str(rounds)]
        workers = job.start_workers(2, *arguments, "--fail-in", "5")
        wait_all(workers, LIMIT_S)
        # The rank that leaves first reports its failure, which may end the other rank's last round.
        ended_by = r"sum_worker: worker \d .* failed: .*(gave up round 5|which nobody declared)"
        for worker in workers:
            assert worker.wait(0) == 0 or re.search(ended_by, worker.text)
        assert 0 in [worker.wait(0) for worker in workers]
        assert "which nobody declared" in workers[0].text
        assert "worker 0 gave up round 5" in workers[1].text
        # byteps.sizing: three times the summed bytes, the pool, and 256 MiB for the process.
        assert job.memory("VmHWM") < 3 * 2 * 400_000 + 16 * MIB + 256 * MIB
        job.end_well(2)


# A server that is stopped (SIGSTOP, or a paused VM) and continues.


OP_TIMEOUT_S = 6.0
PAUSE_S = 8.0
"""Longer than the operations' deadline, and shorter than workers wait for a silent server: 5 s
more."""


@pytest.mark.thorough
def test_a_server_that_stood_still_blames_nobody(run_dir: Path) -> None:
    """Rounds whose deadline passed during the stop are completed with data in the server's
    sockets."""
    settings = {
        "BYTEPS_OP_TIMEOUT_S": str(OP_TIMEOUT_S),
        "BYTEPS_PEER_TIMEOUT_S": "60",
        "BYTEPS_LOG_LEVEL": "DEBUG",
    }
    with SmallCluster(run_dir, **settings) as job:
        arguments = ["--bytes", "40000000", "--tensors", "3", "--rounds", "40"]
        workers = job.start_workers(2, *arguments)
        deadline = time.monotonic() + LIMIT_S
        # Wait until each worker sums.
        while not all("PUSH 'tensor.0'" in worker.text for worker in workers):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        job.server.send(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        job.server.send(signal.SIGCONT)
        wait_all(workers, LIMIT_S)
        assert [worker.wait(0) for worker in workers] == [0, 0]
        wait_all(job.processes[:2], LIMIT_S)
        assert "stood still for" in job.server.text


# A broken invariant (base/invariant.h) ends the job, and every node reports which and where.


WORKERS = 2


@pytest.mark.breaks_invariant
@pytest.mark.parametrize("breaker", [0, 1])
def test_a_broken_invariant_in_a_worker_ends_the_job(run_dir: Path, breaker: int) -> None:
    programs = native.build("byteps-server", "sum_worker")
    # Heartbeats, which carry the report, are 0.5 s apart.
    env = {"DMLC_NUM_WORKER": str(WORKERS), "BYTEPS_PEER_TIMEOUT_S": "3"}
    with SumCluster(run_dir, programs, env, limit_s=LIMIT_S) as job:
        for rank in range(WORKERS):
            # More rounds than the test will wait for.
            words = ["--rounds", "1000000", "--pause-ms", "10"]
            job.start_worker(
                rank, WORKERS, *words, *(["--break-invariant"] if rank == breaker else [])
            )
        wait_all(job.processes, LIMIT_S)
        for process in job.processes:
            assert process.wait(0) == 1, process.title
            said = f"worker {breaker} ({LOOPBACK}) cannot go on: the invariant"
            assert f"{said} 'nothing is broken on purpose' was broken" in process.text


# Settings that are incompatible with copies of state between servers.


BACKUPS = {
    "BYTEPS_BACKUP_STATE": "1",
    "BYTEPS_REPLACE_SERVERS_S": "60",
    "DMLC_NUM_SERVER": "2",
    "DMLC_NUM_WORKER": "1",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9",
}


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"BYTEPS_REPLACE_SERVERS_S": "0"}, "set BYTEPS_REPLACE_SERVERS_S, too"),
        ({"DMLC_NUM_SERVER": "1"}, "needs two servers at least: DMLC_NUM_SERVER"),
        ({"BYTEPS_KEEP": "1"}, "does not go with BYTEPS_KEEP (--keep): unset one of them"),
    ],
    ids=["unreplaced", "alone", "kept"],
)
@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_settings_that_contradict_backups_are_refused(
    run_dir: Path, role: str, env: dict[str, str], why: str
) -> None:
    program = native.build("byteps-server") / "byteps-server"
    ended = captured(
        [program, "--role", role], LIMIT_S, env={**clean_environment(run_dir), **BACKUPS, **env}
    )
    assert ended.returncode == 2
    assert "BYTEPS_BACKUP_STATE" in ended.stderr
    assert why in ended.stderr
