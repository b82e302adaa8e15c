"""Scheduler, server and worker watched by valgrind: what the sanitizers do not see, uninitialised
bytes that are sent or decided upon, and what is lost at the end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import native
from tests.multiproc.cluster import LOOPBACK, Spawned, clean_environment, wait_all, wait_for_file

LIMIT_S = 600.0
WORKERS = 2
FOUND = 99
"""Exit status of a process in which valgrind found something."""
VALGRIND = [
    *("valgrind", "--quiet", f"--error-exitcode={FOUND}"),
    *("--leak-check=full", "--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"),
    f"--suppressions={Path(__file__).with_name('valgrind.supp')}",
]
# Processes are some thirty times slower: nothing that is slow has failed.
PATIENT = {
    name: str(LIMIT_S)
    for name in ("BYTEPS_START_TIMEOUT_S", "BYTEPS_PEER_TIMEOUT_S", "BYTEPS_OP_TIMEOUT_S")
}

pytestmark = [pytest.mark.thorough, pytest.mark.requires("valgrind")]


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    "settings",
    [{}, {"BYTEPS_TRACE_ON": "1"}, {"BYTEPS_TLS": "1"}],
    ids=["plain", "traced", "tls"],
)
def test_a_whole_job(run_dir: Path, settings: dict[str, str]) -> None:
    programs = native.build("byteps-server", "sum_worker")
    port_file = run_dir / "scheduler.port"
    env = {
        **clean_environment(run_dir),
        **PATIENT,
        "DMLC_PS_ROOT_URI": LOOPBACK,
        "DMLC_PS_ROOT_PORT": "0",
        "DMLC_NUM_WORKER": str(WORKERS),
        "DMLC_NUM_SERVER": "1",
        "BYTEPS_PARTITION_BYTES": "16384",
        "BYTEPS_TRACE_DIR": str(run_dir / "traces"),
        **settings,
    }
    server = [*VALGRIND, str(programs / "byteps-server"), "--role"]
    processes: list[Spawned] = []
    try:
        scheduler = [*server, "scheduler", "--port-file", str(port_file)]
        processes.append(Spawned("scheduler", scheduler, env, run_dir))
        env["DMLC_PS_ROOT_PORT"] = wait_for_file(port_file, LIMIT_S, processes).split()[1]
        processes.append(Spawned("server", [*server, "server"], env, run_dir))
        for rank in range(WORKERS):
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
            command = [*VALGRIND, str(programs / "sum_worker"), "--rounds", "4", "--tensors", "3"]
            processes.append(Spawned(f"worker {rank}", command, {**env, **ranks}, run_dir))
        wait_all(processes, LIMIT_S)
        assert {p.title: p.wait(0) for p in processes} == {p.title: 0 for p in processes}
    finally:
        for process in processes:
            if process.running:
                process.send(signal.SIGKILL)
                process.wait(LIMIT_S)
