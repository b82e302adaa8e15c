"""Whole jobs in threads and time that a seed decides (byteps/tests/simulation)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import native

LIMIT_S = 280
FREQUENT = {
    "CallerQueued",
    "CopyCalled",
    "CopyLeft",
    "DeparturesTogether",
    "FailedInJoin",
    "GoneAlready",
    "IncarnationEnds",
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
"""Probes that some hundred seeds reach."""
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
"""The same of jobs of several replicas."""
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
"""The same where servers have copies of each other's state."""


def simulate(*arguments: str) -> str:
    program = native.build("simulate") / "simulate"
    ended = subprocess.run(
        [program, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}{ended.stderr[-2000:]}"
    return ended.stdout


@pytest.mark.slow
def test_schedules_of_messages_and_losses() -> None:
    """Some thousand jobs of `make simulate`, the same ones each time."""
    said = simulate("--seeds", "6000")
    assert "6000 schedules held" in said
    # Had nothing been lost, nothing would have been shown.
    assert int(said.split("held: ")[1].split()[0]) > 500


def reached(said: str) -> dict[str, int]:
    """Of the table of probes (base/probe.h): how many jobs reached each."""
    rows = [line.split("|") for line in said.splitlines() if line.startswith("| ")]
    return {row[1].strip(): int(row[3]) for row in rows[1:]}


def test_few_seeds_reach_rare_branches() -> None:
    """A simulation that went other ways than it should would hold, too."""
    jobs = reached(simulate("--seeds", "600"))
    assert not FREQUENT - jobs.keys()
    assert len(jobs) > len(FREQUENT)


def test_replicas_that_die_and_come_back() -> None:
    said = simulate("--replicas", "--seeds", "600")
    assert "600 schedules held" in said
    assert not FREQUENT_OF_REPLICAS - reached(said).keys()


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


@pytest.mark.parametrize("arguments", [["--seed"], ["--from"]])
def test_bad_usage(arguments: list[str]) -> None:
    program: Path = native.build("simulate") / "simulate"
    assert subprocess.run([program, *arguments], capture_output=True, check=False).returncode == 2
