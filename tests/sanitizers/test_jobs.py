"""Worker, servers and scheduler under AddressSanitizer, UndefinedBehaviorSanitizer,
ThreadSanitizer.

Also a short run of each fuzzer.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from scripts.fuzz import TARGETS, fuzz
from tests import native
from tests.multiproc.cluster import LOOPBACK, Spawned, clean_environment, wait_all, wait_for_file

LIMIT_S = 240.0
WORKERS, SERVERS = 2, 2
RACE_STATUS = 66
"""Exit status of a program in which ThreadSanitizer found an error."""
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("address", marks=pytest.mark.sanitized_by_address),
        pytest.param("thread", marks=pytest.mark.sanitized_by_thread),
    ],
)
def programs(request: pytest.FixtureRequest) -> Path:
    """Folder of the programs, for each sanitizer in sequence."""
    wanted = ("connection_test", "unit_test", "byteps-server", "sum_worker")
    return native.build(*wanted, sanitize=request.param)


@pytest.mark.requires("clang")
@pytest.mark.breaks_invariant
@pytest.mark.timeout(LIMIT_S)
def test_the_worker_over_a_fake_channel(programs: Path, run_dir: Path) -> None:
    log = run_dir / "unit_test.log"
    with log.open("wb") as out:
        ended = subprocess.run(
            [programs / "unit_test", "--gtest_brief=1"],
            env={**os.environ, **OPTIONS},
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    assert ended.returncode == 0


@pytest.mark.requires("clang")
@pytest.mark.timeout(LIMIT_S)
def test_connections(programs: Path, run_dir: Path) -> None:
    with (run_dir / "connection_test.log").open("wb") as out:
        ended = subprocess.run(
            [programs / "connection_test", "--gtest_filter=-*Greeting*:*ADelay*"],
            env={**os.environ, **OPTIONS},
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    assert ended.returncode == 0


@pytest.mark.requires("clang")
@pytest.mark.timeout(LIMIT_S)
def test_memory_that_changes_while_it_is_sent_is_seen(programs: Path, run_dir: Path) -> None:
    """ThreadSanitizer detects it, so tcp/socket.h must not annotate too much."""
    if not programs.name.endswith("thread"):
        return
    log = run_dir / "connection_test.log"
    test = "--gtest_filter=Sending.DISABLED_MemoryThatChanges"
    with log.open("wb") as out:
        ended = subprocess.run(
            [programs / "connection_test", "--gtest_also_run_disabled_tests", test],
            env={**os.environ, **OPTIONS},
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    assert ended.returncode == RACE_STATUS
    text = log.read_text(errors="replace")
    assert "data race" in text and "Connection::Drain" in text


@pytest.mark.requires("clang")
@pytest.mark.timeout(LIMIT_S)
def test_a_whole_job(programs: Path, run_dir: Path) -> None:
    port_file = run_dir / "scheduler.port"
    env = {
        **clean_environment(run_dir),
        **OPTIONS,
        "DMLC_PS_ROOT_URI": LOOPBACK,
        "DMLC_PS_ROOT_PORT": "0",
        "DMLC_NUM_WORKER": str(WORKERS),
        "DMLC_NUM_SERVER": str(SERVERS),
        "BYTEPS_PARTITION_BYTES": "16384",
        "BYTEPS_TRACE_ON": "1",
        "BYTEPS_TRACE_DIR": str(run_dir / "traces"),
    }
    server = str(programs / "byteps-server")
    processes: list[Spawned] = []
    try:
        scheduler = [server, "--role", "scheduler", "--port-file", str(port_file)]
        processes.append(Spawned("scheduler", scheduler, env, run_dir))
        env["DMLC_PS_ROOT_PORT"] = wait_for_file(port_file, LIMIT_S, processes).split()[1]
        for index in range(SERVERS):
            command = [server, "--role", "server"]
            processes.append(Spawned(f"server {index}", command, env, run_dir))
        for rank in range(WORKERS):
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
            command = [str(programs / "sum_worker"), "--rounds", "8", "--tensors", "3"]
            processes.append(Spawned(f"worker {rank}", command, {**env, **ranks}, run_dir))
        wait_all(processes, LIMIT_S)
        assert {p.title: p.wait(0) for p in processes} == {p.title: 0 for p in processes}
    finally:
        for process in processes:
            if process.running:
                process.send(signal.SIGKILL)
                process.wait(LIMIT_S)


# A short run of each fuzzer: its corpus, which has all earlier findings, and some new inputs.


RUNS = {"membership": 1_000, "server": 1_000}
"""Runs of fuzzers that start threads, which are slower."""
OTHER_RUNS = 30_000


@pytest.fixture(scope="session")
def fuzzers() -> Path:
    return native.build("fuzzers", sanitize="address")


@pytest.mark.sanitized_by_address
@pytest.mark.requires("clang")
@pytest.mark.parametrize("target", TARGETS)
def test_target(fuzzers: Path, target: str) -> None:
    runs = RUNS.get(target, OTHER_RUNS)
    assert fuzz(fuzzers, target, runs, seed=1)["executions"] >= runs
