"""The task, the settings and the report, in one process."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.trainkit import rl_chat, rl_report, rl_task
from scripts.trainkit.rl_settings import CHAT, SUMS, Settings

ROOT = Path(__file__).resolve().parents[2]


def settings(**values: Any) -> Settings:
    files = {"model": Path("model"), "questions": Path("sums.parquet"), "folder": Path("folder")}
    return Settings(**files | values)


def compose(overrides: Sequence[str]) -> Any:
    """verl's configuration of its trainer with these overrides."""
    from hydra import compose as of_hydra
    from hydra import initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return of_hydra("ppo_trainer", overrides=list(overrides))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm": "sarsa"}, "algorithm 'sarsa' is not known; it can be grpo, ppo"),
        ({"mode": "late"}, "mode 'late' is not known; it can be sync, colocate_async"),
        ({"ranks": 3, "tensor": 2}, "3 ranks cannot be cut into tensor 2, pipeline 1, context 1"),
        ({"ranks": 3, "rollout_tensor": 2}, "3 ranks cannot be cut into rollouts of 2"),
        ({"ranks": 3, "prompts": 4, "responses": 2}, "cannot be shared by 2 updates of 3 ranks"),
    ],
)
def test_bad_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**values)


def test_byteps_is_a_line_of_verls_configuration() -> None:
    with_it = set(settings().overrides())
    without = set(settings(through_byteps=False).overrides())
    assert without < with_it
    config = "+actor_rollout_ref.actor.megatron.override_ddp_config"
    assert f"{config}.use_dpu_reduce=true" in with_it - without


def test_verl_takes_the_settings(model: Path) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    made = settings(algorithm="ppo", rollout_tensor=2, save_every=2, model=model)
    config = compose(made.overrides())
    assert config.algorithm.adv_estimator == "gae"
    assert config.trainer.use_v1 is True
    assert config.critic.megatron.override_ddp_config.use_dpu_reduce is True
    validate_config(config, need_reference_policy(config), need_critic(config))


def documented() -> list[list[str]]:
    """The additions to verl's command line in docs/use/rl.md, each as a shell's words."""
    blocks = (ROOT / "docs/use/rl.md").read_text(encoding="utf-8").split("```")[1::2]
    blocks = [block.replace("\\\n", " ") for block in blocks if block.startswith("\n  ")]
    return [shlex.split(block) for block in blocks]


def test_verl_takes_what_the_documentation_adds() -> None:
    switches, profile = documented()
    config = compose(["model_engine=megatron", *switches, *profile])
    for role in (config.actor_rollout_ref.actor, config.critic):
        assert role.megatron.override_ddp_config.use_dpu_reduce is True
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    # Ray takes text alone.
    assert variables.DMLC_PS_ROOT_PORT == "9000" and variables.DMLC_NUM_WORKER == "32"
    assert config.actor_rollout_ref.actor.profiler.enable is True


@pytest.mark.parametrize(
    ("answer", "score"), [("12", 1.0), ("1", 0.0), ("", 0.0), ("121", 0.0), ("1=2", 0.0)]
)
def test_only_the_right_sum_is_rewarded(answer: str, score: float) -> None:
    assert rl_task.compute_score(rl_task.SOURCE, answer, "12") == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [("12", 1.0), ("5 + 7 = 12.", 1.0), ("12 is 5 + 7", 0.0), ("112", 0.0), ("twelve", 0.0)],
)
def test_the_last_number_of_an_answer_counts(answer: str, score: float) -> None:
    assert rl_chat.compute_score("sums", answer, "12") == score


def test_a_rank_computes_with_as_many_responses_as_its_task_allows() -> None:
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    logs = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
    assert {f"{micro}=32", f"{logs}=64"} < set(settings(task=SUMS).overrides())
    assert {f"{micro}=8", f"{logs}=8"} < set(settings(task=CHAT).overrides())
    # Six of a rank's eighteen in a step; three of its nine in an update.
    few = settings(task=CHAT, prompts=6, responses=6).overrides()
    assert {f"{micro}=3", f"{logs}=6"} < set(few)


def test_the_base_model_is_asked_as_verl_asks(model: Path, tmp_path: Path) -> None:
    import pandas
    from transformers import AutoTokenizer

    rows = pandas.read_parquet(rl_task.write_questions(tmp_path / "sums.parquet"))
    assert len(rows) == len(rl_task.PAIRS)
    row = rows.iloc[1]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer.apply_chat_template(list(row["prompt"]), add_generation_prompt=True)
    ids = tokens if isinstance(tokens, list) else tokens["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == list("3+4=")
    assert row["reward_model"]["ground_truth"] == "7"


def test_report_reads_what_verl_writes(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir(parents=True)
    lines = [{"step": 0, "data": {"val-core/sums/acc": 0.4}}]
    for number, reward in ((1, 0.2), (2, 0.4), (3, 0.1), (3, 0.6), (4, 0.8), (5, 0.9), (6, 1.0)):
        data = {"critic/score/mean": reward, "actor/kl_loss": 0.01 * number}
        data |= {"training/rollout_probs_diff_max": 0.02, "timing_s/step": 1.5}
        lines.append({"step": number, "data": data})
    # The run began again after step 3: what counts is the last.
    for name, some in (("steps.1.jsonl", lines[:4]), ("steps.jsonl", lines[4:])):
        text = "".join(json.dumps(line) + "\n" for line in some) + '{"step": 9'
        (tmp_path / name).write_text(text)
    for number, output in ((1, "3"), (6, "7")):
        sample = {"input": "3+4=", "output": output, "gts": "7", "score": float(output == "7")}
        # Each step draws from the questions anew.
        other = {"input": f"3+{number}=", "output": "", "gts": "9", "score": 0.0}
        text = "".join(json.dumps(one) + "\n" for one in (sample, other))
        (tmp_path / "samples" / f"{number}.jsonl").write_text(text)
    table = [
        "dpu_reduce: dense gradients over 2 ranks",
        "  buckets  MB   backend         MB per host  MB per server  ms  chosen",
        "  1        0.9  reduce-scatter  0.0          -              -",
        "                BytePS flat     0.0          0.0            -   yes: asked for",
    ]
    (tmp_path / "verl.log").write_text("\n".join(f"(WorkerDict pid=7) {one}" for one in table))
    outcome = rl_report.read(tmp_path, "BytePS")
    assert outcome.first_reward == pytest.approx(0.4)
    assert outcome.last_reward == pytest.approx(0.9)
    assert [step.number for step in outcome.steps] == [1, 2, 3, 4, 5, 6]
    assert outcome.backends == ["BytePS flat"]
    lines_of = rl_report.samples(outcome).splitlines()
    assert lines_of[2].split() == ["3+4=", "7", "3", "7"]
    assert lines_of[3].split() == ["all", "0", "of", "2", "1", "of", "2"]
    picture = tmp_path / "picture.png"
    rl_report.draw([outcome], picture, "title")
    assert picture.read_bytes().startswith(b"\x89PNG")
