"""A broken invariant (base/invariant.h) ends the job, and every node says which and where."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import native
from tests.multiproc.cluster import LOOPBACK, Spawned, clean_environment, wait_all, wait_for_file

WORKERS = 2
LIMIT_S = 120.0


@pytest.mark.breaks_invariant
@pytest.mark.parametrize("breaker", [0, 1])
def test_one_broken_in_a_worker_ends_the_job(run_dir: Path, breaker: int) -> None:
    programs = native.build("byteps-server", "sum_worker")
    port_file = run_dir / "port"
    env = clean_environment(run_dir) | {
        "DMLC_PS_ROOT_URI": LOOPBACK,
        "DMLC_PS_ROOT_PORT": "0",
        "DMLC_NUM_WORKER": str(WORKERS),
        "DMLC_NUM_SERVER": "1",
        # Heartbeats, which carry the news, are 0.5 s apart.
        "BYTEPS_PEER_TIMEOUT_S": "3",
    }
    server = str(programs / "byteps-server")
    processes: list[Spawned] = []
    try:
        scheduler = [server, "--role", "scheduler", "--port-file", str(port_file)]
        processes.append(Spawned("scheduler", scheduler, env, run_dir))
        env["DMLC_PS_ROOT_PORT"] = wait_for_file(port_file, LIMIT_S, processes).split()[1]
        processes.append(Spawned("server 0", [server, "--role", "server"], env, run_dir))
        for rank in range(WORKERS):
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
            # More rounds than anybody waits for.
            command = [str(programs / "sum_worker"), "--rounds", "1000000", "--pause-ms", "10"]
            if rank == breaker:
                command.append("--break-invariant")
            processes.append(Spawned(f"worker {rank}", command, {**env, **ranks}, run_dir))
        wait_all(processes, LIMIT_S)
        for process in processes:
            assert process.wait(0) == 1, process.title
            words = f"worker {breaker} ({LOOPBACK}) cannot go on: the invariant"
            assert f"{words} 'nothing is broken on purpose' was broken" in process.text
    finally:
        for process in processes:
            if process.running:
                process.send(signal.SIGKILL)
                process.wait(LIMIT_S)
