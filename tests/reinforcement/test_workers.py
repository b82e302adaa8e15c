"""Actor and critic of one job train through BytePS; the rollout serves what was trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts.reinforcement.rows import LAYOUTS
from tests.layouts.reinforcement.runs import compare
from tests.layouts.rows import named


@pytest.mark.parametrize(
    ("layout", "algorithm"),
    [
        ("dp2", "ppo"),
        pytest.param("dp2", "grpo", marks=pytest.mark.thorough),
        pytest.param("tp2-dp2", "grpo", marks=pytest.mark.thorough),
        ("pp2-dp2", "ppo"),
        ("tp2-dp2-to-tp1", "grpo"),
        pytest.param("tp2-pp2-to-tp1", "ppo", marks=pytest.mark.thorough),
    ],
)
def test_trains_as_through_all_reduce(
    fork_server: None,
    tmp_path: Path,
    model: Path,
    reward_model: Path,
    layout: str,
    algorithm: str,
) -> None:
    # That every bucket of both models is summed at every step, under a name of its own, is seen
    # to by compare().
    outcome = compare(tmp_path / "job", named(LAYOUTS, [layout])[0], algorithm, model, reward_model)
    assert set(outcome.equal) == ({"actor", "critic"} if algorithm == "ppo" else {"actor"})
    assert not outcome.problems(), outcome
    assert outcome.apart > 0  # layouts, and fp32 from bf16, are told apart
    assert (outcome.rewards_apart is None) == (algorithm == "grpo")
    assert (outcome.sent_bytes is None) == ("-to-" not in layout)
