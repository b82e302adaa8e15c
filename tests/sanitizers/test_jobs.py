"""Worker, servers and scheduler under AddressSanitizer, UndefinedBehaviorSanitizer,
ThreadSanitizer.

Also a short run of each fuzzer.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from scripts.fuzz import TARGETS, fuzz
from tests import native
from tests.multiproc.sum_cluster import SumCluster

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


def run(program: Path, log: Path, *arguments: str) -> int:
    """Run a test program under its sanitizer; return its exit status."""
    with log.open("wb") as out:
        return subprocess.run(
            [program, *arguments],
            env={**os.environ, **OPTIONS},
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        ).returncode


@pytest.mark.requires("clang")
@pytest.mark.breaks_invariant
@pytest.mark.timeout(LIMIT_S)
def test_the_worker_over_a_fake_channel(programs: Path, run_dir: Path) -> None:
    assert run(programs / "unit_test", run_dir / "unit_test.log", "--gtest_brief=1") == 0


@pytest.mark.requires("clang")
@pytest.mark.timeout(LIMIT_S)
def test_connections(programs: Path, run_dir: Path) -> None:
    tests = "--gtest_filter=-*Greeting*:*ADelay*"
    assert run(programs / "connection_test", run_dir / "connection_test.log", tests) == 0


@pytest.mark.requires("clang")
@pytest.mark.timeout(LIMIT_S)
def test_memory_that_changes_while_it_is_sent_is_seen(programs: Path, run_dir: Path) -> None:
    """ThreadSanitizer detects this race, so tcp/socket.h must not annotate too much."""
    if not programs.name.endswith("thread"):
        return
    log = run_dir / "connection_test.log"
    words = ("--gtest_also_run_disabled_tests", "--gtest_filter=Sending.DISABLED_MemoryThatChanges")
    assert run(programs / "connection_test", log, *words) == RACE_STATUS
    text = log.read_text(errors="replace")
    assert "data race" in text and "Connection::Drain" in text


@pytest.mark.requires("clang")
@pytest.mark.timeout(LIMIT_S)
def test_a_whole_job(programs: Path, run_dir: Path) -> None:
    env = {
        **OPTIONS,
        "DMLC_NUM_WORKER": str(WORKERS),
        "BYTEPS_PARTITION_BYTES": "16384",
        "BYTEPS_TRACE_ON": "1",
        "BYTEPS_TRACE_DIR": str(run_dir / "traces"),
    }
    with SumCluster(run_dir, programs, env, servers=SERVERS, limit_s=LIMIT_S) as job:
        job.start_workers(WORKERS, "--rounds", "8", "--tensors", "3")
        job.finish()


# A short run of each fuzzer, with its corpus, which has all earlier findings, and some new inputs.


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
