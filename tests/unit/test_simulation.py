"""Whole jobs in threads and time that a seed decides (byteps/tests/simulation)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import native
import pytest

LIMIT_S = 280


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


def test_a_seed_is_one_order_of_events() -> None:
    assert "200 schedules held" in simulate("--seeds", "200", "--twice")


@pytest.mark.parametrize("arguments", [["--seed"], ["--from"]])
def test_bad_usage(arguments: list[str]) -> None:
    program: Path = native.build("simulate") / "simulate"
    assert subprocess.run([program, *arguments], capture_output=True, check=False).returncode == 2
