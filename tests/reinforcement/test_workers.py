"""Actor and critic of one job train through BytePS; the rollout serves what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rl_programs
from paritykit.forked import Job

# bf16 keeps 8 bits, and log-probabilities go down to some -5.
ROUNDING = 0.1


def run(tmp_path: Path, model: Path, name: str, ranks: int, **settings: Any) -> list[Any]:
    """What each rank returned."""
    shared = {"algorithm": "ppo", "ranks": ranks, "model": model, **settings}
    copies = ranks // (settings.get("tensor", 1) * settings.get("pipeline", 1))
    # Its number of rows is the programs', in one micro-batch.
    shared |= {"prompts": len(rl_programs.PROMPTS), "responses": copies}
    job = Job(
        folder=tmp_path / name,
        program=f"{rl_programs.__name__}:{rl_programs.train.__name__}",
        ranks=ranks,
        settings={"settings": shared},
    )
    job.run()
    return [job.result(rank) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "tensor", "pipeline"),
    [(2, 1, 1), (4, 2, 1), pytest.param(4, 1, 2, marks=pytest.mark.thorough)],
)
def test_actor_and_critic_train_as_through_all_reduce(
    fork_server: None, tmp_path: Path, model: Path, ranks: int, tensor: int, pipeline: int
) -> None:
    layout = {"tensor": tensor, "pipeline": pipeline}
    ours = run(tmp_path, model, "byteps", ranks, through_byteps=True, **layout)
    theirs = run(tmp_path, model, "all-reduce", ranks, through_byteps=False, **layout)
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one["checksums"] == other["checksums"], rank
        # Every bucket of both models was summed at every step, under a name of its own.
        actor, critic = one["names"]["actor"], one["names"]["critic"]
        assert actor and critic and not set(actor) & set(critic)
        assert sorted(one["summed"]) == sorted([*actor, *critic] * rl_programs.STEPS)
        assert not other["summed"]
        # The rollout has what was trained, as one whole model.
        for differ in one["differ"]:
            assert differ is None or 0 < differ < ROUNDING, (rank, one["differ"])
    assert any(one["differ"][0] is not None for one in ours)
    checksums = [one["checksums"]["actor"] for one in ours]
    assert len(set(checksums)) == tensor * pipeline
