"""The C++ test programs in parts: units, connections, simulated jobs, jobs under valgrind.

Also the initial inputs of fuzzers.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from scripts import fuzz
from scripts.children import captured
from scripts.fuzz import TARGETS
from tests import native
from tests.multiproc.sum_cluster import SumCluster

BYTEPS = Path(__file__).resolve().parents[2] / "byteps"
PROGRAM = re.compile(r"add_executable\(unit_test\s([^)]+)\)")
"""Finds the program's sources in cmake/Tests.cmake."""


def _suites(text: str) -> list[str]:
    """List the suites of a source by the names of their tests."""
    plain = re.findall(r"^TEST(?:_F)?\((\w+),", text, re.M)
    of_values = re.findall(r"^INSTANTIATE_TEST_SUITE_P\(\s*(\w+),\s*(\w+),", text, re.M)
    return plain + [f"{values}/{suite}" for values, suite in of_values]


SUITES = sorted(
    {
        suite
        for source in PROGRAM.findall((BYTEPS / "cmake/Tests.cmake").read_text())[0].split()
        if source.endswith("_test.cc")
        for suite in _suites((BYTEPS / source).read_text())
    }
)
LIMIT_S = 280


def test_a_scheduler_needs_nothing_of_recovery(run_dir: Path) -> None:
    """A scheduler without the code of recovery runs jobs. It ends them at the first loss."""
    program = native.build("scheduler_without_recovery") / "scheduler_without_recovery"
    run(program, "*", run_dir / "test.log")


@pytest.fixture(scope="session")
def unit_test() -> Path:
    return native.build("unit_test") / "unit_test"


def test_every_suite_is_run(unit_test: Path) -> None:
    listed = subprocess.run(
        [unit_test, "--gtest_list_tests"], capture_output=True, text=True, check=True
    )
    suites = {line.removesuffix(".") for line in listed.stdout.splitlines() if line.endswith(".")}
    assert suites == set(SUITES)


def test_a_server_without_recovery_sums_and_fails_what_lacks_a_lost_worker(unit_test: Path) -> None:
    tests = ("SmallSumsAreSentByWhoBringsThem", "LostWorkerEndsRoundsBeforeTheirDeadline")
    run = subprocess.run(
        [
            unit_test.with_name("server_without_recovery"),
            "--gtest_filter=" + ":".join(f"ServerTest.{test}" for test in tests),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert "[  PASSED  ] 2 tests" in run.stdout


MARKS = {
    "Invariant": pytest.mark.breaks_invariant,
    # These suites wait for messages that come late.
    **dict.fromkeys(
        (
            "Deterministic/AbsentTest",
            "SchedulerReturnTest",
            "Remains",
            "Contract.*",
            "Greeting.*/Tls",
        ),
        pytest.mark.slow,
    ),
}


@pytest.mark.parametrize(
    "suite",
    [pytest.param(suite, marks=MARKS.get(suite, ())) for suite in SUITES],
)
def test_suite(unit_test: Path, run_dir: Path, suite: str) -> None:
    log = run_dir / "unit_test.log"
    with log.open("wb") as out:
        ended = subprocess.run(
            [unit_test, f"--gtest_filter={suite}.*"],
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    assert ended.returncode == 0
    assert "[  PASSED  ] 0 tests" not in log.read_text(errors="replace")


# Both ends of TCP connections in a process, with a relay (byteps/tests/net/tcp/connection).


CONNECTION_SUITES = (
    "ConnectionOverNics",
    "Contract",
    "Greeting",
    "Refusal",
    "Sending",
    "VanInbox",
)
PARTS = [*(f"{suite}.*" for suite in CONNECTION_SUITES if suite != "Greeting")]
PARTS += ["Greeting.*/Plain", "Greeting.*/Tls"]  # each waits for seconds
CONNECTION_LIMIT_S = 500


@pytest.fixture(scope="module")
def connection_test() -> Path:
    return native.build("connection_test") / "connection_test"


def run(program: Path, part: str, log: Path, *, thorough: bool = False) -> str:
    env = {**os.environ, "CONNECTION_TEST_THOROUGH": "1"} if thorough else dict(os.environ)
    with log.open("wb") as out:
        ended = subprocess.run(
            [program, f"--gtest_filter=*{part}"],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=CONNECTION_LIMIT_S,
            check=False,
        )
    assert ended.returncode == 0
    return log.read_text(errors="replace")


def test_every_suite_of_connections_is_run(connection_test: Path) -> None:
    listed = subprocess.run(
        [connection_test, "--gtest_list_tests"], capture_output=True, text=True, check=True
    )
    lines = [line.split()[0] for line in listed.stdout.splitlines() if not line.startswith(" ")]
    suites = {line.removesuffix(".").rpartition("/")[2] for line in lines if line.endswith(".")}
    assert suites == set(CONNECTION_SUITES)


@pytest.mark.parametrize("part", [pytest.param(part, marks=MARKS.get(part, ())) for part in PARTS])
def test_each_part_of_the_connection_test(connection_test: Path, run_dir: Path, part: str) -> None:
    assert "[  PASSED  ] 0 tests" not in run(connection_test, part, run_dir / "test.log")


@pytest.mark.thorough
@pytest.mark.timeout(CONNECTION_LIMIT_S)
def test_damage_at_every_place(connection_test: Path, run_dir: Path) -> None:
    """Every bit of a greeting is flipped once. At each byte the greeting is cut, held, or extended
    by a byte."""
    run(connection_test, "Greeting.*", run_dir / "test.log", thorough=True)


def test_encryption(run_dir: Path) -> None:
    """Encryption between two sockets, without a job (byteps/tests/net/tls)."""
    program = native.build("tls_test") / "tls_test"
    assert "[  PASSED  ] 0 tests" not in run(program, "*", run_dir / "test.log")


# Whole jobs in threads, with time and schedule determined by a seed (byteps/tests/simulation).


FREQUENT = {
    "CallerQueued",
    "CopyCalled",
    "CopyLeft",
    "DeparturesTogether",
    "FailedInJoin",
    "GoneAlready",
    "GenerationEnds",
    "LastLeaves",
    "LastWord",
    "LinkReported",
    "LooksSooner",
    "NoSpareMemory",
    "PushAfterFailure",
    "PushAwaitsPinned",
    "QueuedWhileServing",
    "RoundLate",
    "RoundOfLost",
    "RoundsOpen",
    "SaysGoodbye",
    "SentByCaller",
    "ServedHere",
    "StepDropped",
    "StepMade",
    "StepOvertaken",
    "StepRedone",
    "StepsBack",
    "WindowFull",
}
"""Probes that FEW_SEEDS reach."""
FEW_SEEDS = 600
FREQUENT_OF_REPLICAS = {
    "LinkReported",
    "PushOfAbsent",
    "ReplicaJoined",
    "ReplicaRemoved",
    "RoundLosesMember",
    "RoundShort",
    "SchedulerAway",
    "SchedulerGoesOn",
}
"""Probes that jobs of several replicas reach."""
FREQUENT_OF_BACKUPS = {
    "AnsweredAgain",
    "BackupLost",
    "HeldForBackup",
    "LateRecord",
    "LoadCopied",
    "RoundCopied",
    "ServerReplaced",
    "StateCopied",
    "StateFetched",
    "StepCopied",
}
"""Probes that jobs reach whose servers have copies of each other's state."""


def simulate(*arguments: str) -> str:
    program = native.build("simulate") / "simulate"
    ended = captured([program, *arguments], LIMIT_S)
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}{ended.stderr[-2000:]}"
    return ended.stdout


@pytest.mark.slow
def test_schedules_of_messages_and_losses() -> None:
    """Jobs of `make simulate` keep all conditions. Their seeds follow those of the next test."""
    said = simulate("--from", f"{FEW_SEEDS + 1}", "--seeds", "1400")
    assert "1400 schedules held" in said
    # If no job had a loss, the test would show nothing.
    assert int(said.split("held: ")[1].split()[0]) > 280


def reached(said: str) -> dict[str, int]:
    """Get the number of jobs that reached each probe from the table of probes
    (base/invariant.h)."""
    rows = [line.split("|") for line in said.splitlines() if line.startswith("| ")]
    return {row[1].strip(): int(row[3]) for row in rows[1:]}


def test_few_seeds_reach_rare_branches() -> None:
    """A simulation that never takes rare branches would pass, too, so all probes must be
    reached."""
    said = simulate("--seeds", f"{FEW_SEEDS}")
    assert f"{FEW_SEEDS} schedules held" in said
    jobs = reached(said)
    assert not FREQUENT - jobs.keys()
    assert len(jobs) > len(FREQUENT)


@pytest.mark.slow
def test_replicas_that_die_and_come_back() -> None:
    said = simulate("--replicas", "--seeds", "600")
    assert "600 schedules held" in said
    assert not FREQUENT_OF_REPLICAS - reached(said).keys()


@pytest.mark.slow
def test_servers_whose_state_is_copied() -> None:
    said = simulate("--backups", "--seeds", "1000")
    assert "1000 schedules held" in said
    assert not FREQUENT_OF_BACKUPS - reached(said).keys()


def test_a_broken_invariant_is_noticed() -> None:
    program: Path = native.build("simulate") / "simulate"
    command: list[str | Path] = [program, "--seeds", "1", "--break-invariant"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 1
    assert "the invariant 'nothing is broken on purpose' was broken" in ended.stdout


def test_a_seed_is_one_order_of_events() -> None:
    assert "200 schedules held" in simulate("--seeds", "200", "--twice")


# Jobs under valgrind, which finds errors that sanitizers miss: uninitialized bytes that are sent or
# decided upon, and leaks.


VALGRIND_LIMIT_S = 600.0
WORKERS = 2
FOUND = 99
"""Exit status of a process in which valgrind found an error."""
VALGRIND = [
    *("valgrind", "--quiet", f"--error-exitcode={FOUND}"),
    *("--leak-check=full", "--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"),
    f"--suppressions={Path(__file__).with_name('valgrind.supp')}",
]
# Processes are about thirty times slower, so no timeout may end them.
PATIENT = {
    name: str(VALGRIND_LIMIT_S)
    for name in ("BYTEPS_START_TIMEOUT_S", "BYTEPS_PEER_TIMEOUT_S", "BYTEPS_OP_TIMEOUT_S")
}


@pytest.mark.thorough
@pytest.mark.requires("valgrind")
@pytest.mark.timeout(2 * VALGRIND_LIMIT_S)
@pytest.mark.parametrize(
    "settings",
    [{}, {"BYTEPS_TRACE_ON": "1"}, {"BYTEPS_TLS": "1"}],
    ids=["plain", "traced", "tls"],
)
def test_a_whole_job(run_dir: Path, settings: dict[str, str]) -> None:
    programs = native.build("byteps-server", "sum_worker")
    env = {
        **PATIENT,
        "DMLC_NUM_WORKER": str(WORKERS),
        "BYTEPS_PARTITION_BYTES": "16384",
        "BYTEPS_TRACE_DIR": str(run_dir / "traces"),
        **settings,
    }
    with SumCluster(run_dir, programs, env, prefix=VALGRIND, limit_s=VALGRIND_LIMIT_S) as job:
        job.start_workers(WORKERS, "--rounds", "4", "--tensors", "3")
        job.finish()


# Initial inputs of fuzzers.


def test_each_target_has_a_corpus() -> None:
    assert {folder.name for folder in fuzz.unpack().iterdir()} == set(TARGETS)
