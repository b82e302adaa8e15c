"""The reward as a Megatron model: its training, its values in each layout, its place in a batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_byteps_rl import reward, reward_training, task, trainer
from megatron_byteps_rl.reward_group import ModelReward
from megatron_byteps_rl.settings import Settings
from tests.layouts.job import Job

STEPS = 40
# Training and reward compute in bf16, the whole model in fp32: up to 0.02 was seen.
ROUNDING = 0.06


def ran(folder: Path, ranks: int, function: str, **settings: Any) -> list[Any]:
    job = Job(
        folder=folder,
        program=f"tests.layouts.reinforcement.rewards:{function}",
        ranks=ranks,
        settings=settings,
    )
    job.run()
    return job.results()


def test_its_training_goes_through_byteps_and_every_layout_gives_its_rewards(
    fork_server: None, tmp_path: Path, model: Path
) -> None:
    out = tmp_path / "reward"
    trained = {}
    for name, byteps, written in (("byteps", True, out), ("all-reduce", False, None)):
        settings = {"algorithm": "ppo", "through_byteps": byteps, "model": model}
        trained[name] = ran(
            tmp_path / name, 2, "train", settings=settings, steps=STEPS, out=written
        )
    ours, theirs = trained["byteps"], trained["all-reduce"]
    for made in ours:
        assert made.summed == STEPS  # one bucket
        assert made.checksum == ours[0].checksum
    assert not any(made.summed for made in theirs)
    assert [made.checksum for made in ours] == [made.checksum for made in theirs]
    assert ours[0].losses == theirs[0].losses and len(ours[0].losses) == STEPS
    assert sum(ours[0].losses[-10:]) < sum(ours[0].losses[:10]) / 2
    assert (out / reward_training.NOTE).is_file()
    seen = {}
    for name, ranks, layout in (
        ("dp1", 1, {}),
        ("tp2", 2, {"tensor": 2}),
        ("pp2", 2, {"pipeline": 2}),
    ):
        settings = {"algorithm": "ppo", "ranks": ranks, "model": model, **layout}
        results = ran(tmp_path / name, ranks, "values", settings=settings, model=out)
        assert all(result["frozen"] for result in results)
        (seen[name],) = [one["scored"] for one in results if one["scored"] is not None]
    for scored in seen.values():
        torch.testing.assert_close(scored["rewards"], scored["whole"], atol=ROUNDING, rtol=0)
        torch.testing.assert_close(scored["rewards"], seen["dp1"]["rewards"], atol=ROUNDING, rtol=0)
        # They tell answers apart by more than rounding.
        assert scored["rewards"].std() > 4 * ROUNDING


def test_answers_are_labelled_by_the_rule(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    drawn = [(3, 4, "7"), (3, 4, "8"), (7, 7, "14"), (7, 7, "1"), (5, 5, ""), (6, 3, "1+9")]
    made = reward_training.batch(tokenizer, drawn).batch
    assert made["labels"].tolist() == [1, 0, 1, 0, 0, 0]
    # The end of the text is a token, where there is room for it.
    assert made["response_mask"].sum(1).tolist() == [2, 2, 3, 2, 1, 3]
    ends = made["responses"] == tokenizer.eos_token_id
    assert ends.sum(1).tolist() == [1, 1, 1, 1, 1, 0]
    one, again = (
        reward_training.answers(400, torch.Generator().manual_seed(seed)) for seed in (1, 1)
    )
    assert one == again
    assert one != reward_training.answers(400, torch.Generator().manual_seed(2))
    right = [task.compute_score(task.SOURCE, text, str(a + b)) for a, b, text in one]
    assert 0.5 <= sum(right) / 400 < 0.6


class Group:
    """Gives the first token of a response as the reward, for two data-parallel ranks."""

    def __init__(self) -> None:
        self._dispatch_info = {"train": [0, 1]}

    def compute_rewards(self, data: Any) -> Any:
        assert len(data) % 2 == 0
        return {"rewards": data["responses"][:, 0].float()}


def test_a_reward_stands_at_the_last_token_of_its_response() -> None:
    made = ModelReward.__new__(ModelReward)
    made.config = {reward.SECTION: {}}
    made.reward_wg = Group()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    prompts, responses = torch.full((3, 2), 5), torch.tensor([[7, 1, 0], [8, 0, 0], [9, 2, 3]])
    attention = torch.cat([torch.tensor([[0, 1], [1, 1], [1, 1]]), mask], 1)
    from verl import DataProto

    batch = DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "response_mask": mask,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        },
        meta_info={"reward_extra_keys": ["acc"]},
    )
    scores = made._compute_reward_colocate(batch)
    assert scores.batch["rm_scores"].tolist() == [[0, 7, 0], [8, 0, 0], [0, 0, 9]]
    assert batch.union(scores).meta_info["reward_extra_keys"] == ["acc"]


def test_the_last_token_of_each_sequence_counts() -> None:
    values = torch.nested.nested_tensor_from_jagged(
        torch.arange(6, dtype=torch.bfloat16), offsets=torch.tensor([0, 1, 4, 6])
    )
    assert reward.at_last_token(values).tolist() == [0, 3, 5]


def config(*more: str) -> Any:
    made = Settings(
        algorithm="ppo",
        reward="megatron",
        reward_model=Path("reward"),
        ranks=4,
        tensor=2,
        model=Path("model"),
        folder=Path("folder"),
    )
    return trainer.compose([*made.overrides(), *more])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward_worker.megatron.forward_only=false", "forward_only is false: the reward's model"),
        ("reward_worker.megatron.tensor_model_parallel_size=1", "size=1, and the actor has 2"),
        ("reward.reward_model.enable=true", "are two models for one reward; take one away"),
    ],
)
def test_rewards_that_cannot_be_are_refused(override: str, message: str) -> None:
    reward.check(config())
    with pytest.raises(ValueError, match=message):
        reward.check(config(override))


def test_profiling_starts_and_stops_the_rewards_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    for name in ("_start_profiling", "_stop_profiling"):
        monkeypatch.setattr(RayPPOTrainer, name, lambda *args: None)
    calls: list[str] = []
    made = ModelReward.__new__(ModelReward)
    made.config, made.global_steps = {reward.SECTION: {}}, 3
    made.reward_wg = SimpleNamespace(
        start_profile=lambda profile_step: calls.append(f"start {profile_step}"),
        stop_profile=lambda run_command: calls.append(f"stop {run_command}"),
    )
    made._start_profiling(False)
    made._stop_profiling(False)
    assert not calls
    made._start_profiling(True)
    made._stop_profiling(True, run_command=True)
    assert calls == ["start 3", "stop True"]
