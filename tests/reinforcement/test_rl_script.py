"""scripts/rl.py: what it refuses. `make rl` and `make rl-layouts` run it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scripts import rl


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "3", "--tensor", "2"], "--workers 3 is no multiple of --tensor 2"),
        (["--rollout-tensor", "3"], "--workers 2 is no multiple of --rollout-tensor 3"),
        (["--algorithm", "sarsa"], "invalid choice: 'sarsa'"),
        (["--mode", "late"], "invalid choice: 'late'"),
    ],
)
def test_bad_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        rl.parse(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_ranks_without_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rl, "_gpus", lambda: 1)
    assert rl.main(["--device", "cuda", "--workers", "2"]) == 1
    assert "2 ranks need 2 GPUs, and torch sees 1" in capsys.readouterr().err


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rl, "NEEDED", ("not_there.at_all", "json"))
    assert rl.main([]) == 1
    assert "error: not_there.at_all: not installed here; use `make rl`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "rise", "good"), [(20, 0.19, False), (20, 0.2, True), (3, -0.01, False), (3, 0, True)]
)
def test_the_reward_has_to_rise(steps: int, rise: float, good: bool) -> None:
    outcome: Any = SimpleNamespace(first_reward=0.5, last_reward=0.5 + rise)
    assert rl.check(outcome, rl.parse(["--steps", str(steps)]).rise - 1e-9) is good
