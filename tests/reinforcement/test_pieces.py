"""The task, the settings, the rollout and the report, in one process."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_byteps_rl import task
from megatron_byteps_rl.settings import Settings
from scripts.trainkit import rl_report

ROOT = Path(__file__).resolve().parents[2]


def settings(**values: Any) -> Settings:
    return Settings(model=Path("model"), folder=Path("folder"), **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm": "sarsa"}, "algorithm 'sarsa' is not known; it can be grpo, ppo"),
        ({"ranks": 3, "tensor": 2}, "3 ranks cannot be cut into tensor 2, pipeline 1"),
        ({"rollout": "vllm"}, "rollout 'vllm' is not known; it can be transformers, megatron"),
        ({"reward": "judge"}, "reward 'judge' is not known; it can be rule, megatron"),
        ({"reward": "megatron"}, "'megatron' with the model None: the reward megatron needs a"),
        ({"reward_model": Path("some")}, "'rule' with the model some: .* and the rule none"),
        ({"rollout_tensor": 2}, "rollout_tensor 2 needs the rollout megatron"),
        (
            {"ranks": 3, "rollout": "megatron", "rollout_tensor": 2},
            "3 ranks cannot be cut into copies of 2 for the rollout",
        ),
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


def test_verl_takes_the_settings_and_refuses_others() -> None:
    from megatron_byteps_rl import trainer

    config = trainer.compose(settings(algorithm="ppo").overrides())
    assert config.algorithm.adv_estimator == "gae"
    assert config.critic.megatron.override_ddp_config.use_dpu_reduce is True
    with pytest.raises(ValueError, match="not_there"):
        trainer.compose(["actor_rollout_ref.not_there=1"])


def documented() -> list[list[str]]:
    """The additions to verl's command line in docs/use/rl.md, each as a shell's words."""
    blocks = (ROOT / "docs/use/rl.md").read_text(encoding="utf-8").split("```")[1::2]
    blocks = [block.replace("\\\n", " ") for block in blocks if block.startswith("\n  ")]
    return [shlex.split(block) for block in blocks]


def test_verl_takes_what_the_documentation_adds() -> None:
    from megatron_byteps_rl import trainer

    switches, reward, profile = documented()
    config = trainer.compose(["model_engine=megatron", *switches, *reward, *profile])
    for role in (config.actor_rollout_ref.actor, config.critic):
        assert role.megatron.override_ddp_config.use_dpu_reduce is True
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    # Ray takes text alone.
    assert variables.DMLC_PS_ROOT_PORT == "9000" and variables.DMLC_NUM_WORKER == "32"
    assert config.reward_worker.megatron.forward_only is True
    assert config.actor_rollout_ref.actor.profiler.enable is True


@pytest.mark.parametrize(
    ("answer", "score"), [("12", 1.0), ("1", 0.0), ("", 0.0), ("121", 0.0), ("1=2", 0.0)]
)
def test_only_the_right_sum_is_rewarded(answer: str, score: float) -> None:
    assert task.compute_score(task.SOURCE, answer, "12") == score


def rollout(model: Path) -> Any:
    from transformers import AutoConfig, AutoTokenizer

    from megatron_byteps_rl.rollout import TransformersRollout

    made = TransformersRollout.__new__(TransformersRollout)
    made.config = SimpleNamespace(prompt_length=task.PROMPT_TOKENS + 2)
    made.model_config = SimpleNamespace(
        hf_config=AutoConfig.from_pretrained(model), tokenizer=AutoTokenizer.from_pretrained(model)
    )
    made.build()
    return made


def weights(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def test_the_rollout_draws_what_its_log_probabilities_say(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = rollout(model)
    asyncio.run(made.update_weights(weights(model).items()))
    ask = made.model_config.tokenizer
    prompts = [ask(text).input_ids for text in ("3+4=", "7+7=", "6+3=")]
    one, again, other = (
        made.generate(prompts * 20, length=3, temperature=1.0, seed=seed) for seed in (5, 5, 6)
    )
    assert torch.equal(one.responses, again.responses)
    assert not torch.equal(one.responses, other.responses)
    # Against the whole model, without padding and without a cache.
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for row in range(6):
        length = int(one.response_mask[row].sum())
        tokens = torch.tensor([*prompts[row % 3], *one.responses[row][:length].tolist()])
        scores = torch.log_softmax(plain(tokens[None]).logits[0, :-1], -1)
        wanted = scores.gather(-1, tokens[1:, None])[-length:, 0]
        torch.testing.assert_close(one.log_probs[row][:length], wanted, atol=1e-4, rtol=1e-4)
        assert not one.log_probs[row][length:].any()
    greedy = made.generate(prompts, length=3, temperature=0.0, seed=0)
    texts = [ask.decode(row, skip_special_tokens=True) for row in greedy.responses]
    assert texts == ["7", "14", "9"]
    # The base model knows, and is unsure.
    tried = made.generate(prompts * 200, length=3, temperature=1.0, seed=3)
    right = sum(
        ask.decode(row, skip_special_tokens=True) == ["7", "14", "9"][number % 3]
        for number, row in enumerate(tried.responses)
    )
    assert 0.1 < right / 600 < 0.9


def test_weights_that_do_not_fit_are_refused(model: Path) -> None:
    made = rollout(model)
    with pytest.raises(RuntimeError, match="before the first update_weights"):
        made.generate([[4]], length=1, temperature=1.0, seed=0)
    whole = weights(model)
    name = "model.norm.weight"
    for change, message in (
        ({"model.nobody": whole[name]}, "sent model.nobody, which the model has not"),
        ({name: torch.ones(3)}, rf"sent {name} as \(3,\), and the model has \(64,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(made.update_weights((whole | change).items()))
    fewer = {key: value for key, value in whole.items() if key != name}
    with pytest.raises(ValueError, match=f"did not send {name}"):
        asyncio.run(made.update_weights(fewer.items()))


def test_report_reads_what_verl_writes(tmp_path: Path) -> None:
    def write(folder: Path, rewards: list[float], checksum: str) -> rl_report.Outcome:
        (folder / "samples").mkdir(parents=True)
        lines = [{"step": 0, "data": {"val-core/sums/acc": 0.4}}]
        for number, reward in enumerate(rewards, 1):
            data = {"critic/score/mean": reward, "actor/kl_loss": 0.01 * number}
            data |= {"training/rollout_probs_diff_max": 0.02, "timing_s/step": 1.5}
            data |= {"rule/accuracy": reward / 2}
            if number > 1:
                data |= {"reshard/seconds": 0.25, "reshard/sent_bytes": 4e6}
            lines.append({"step": number, "data": data})
        text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9'
        (folder / "steps.jsonl").write_text(text)
        for number, output in ((0, "3"), (len(rewards), "7")):
            sample = {"input": "3+4=", "output": output, "gts": "7", "acc": output == "7"}
            (folder / "samples" / f"{number}.jsonl").write_text(json.dumps(sample) + "\n")
        end = {"parameters_sha256": {"actor": [checksum, checksum]}}
        (folder / "end.json").write_text(json.dumps(end))
        return rl_report.read(folder, "BytePS")

    outcome = write(tmp_path / "one", [0.2, 0.4, 0.6, 0.8, 0.9, 1.0], "a")
    assert outcome.first_reward == pytest.approx(0.4)
    assert outcome.last_reward == pytest.approx(0.9)
    assert outcome.first_accuracy == pytest.approx(0.2)
    assert outcome.last_accuracy == pytest.approx(0.45)
    assert [step.number for step in outcome.steps] == [1, 2, 3, 4, 5, 6]
    assert outcome.steps[0].reshard is None
    assert outcome.steps[1].reshard == rl_report.Reshard(seconds=0.25, sent_bytes=4_000_000)
    lines = rl_report.samples(outcome).splitlines()
    assert lines[2].split() == ["3+4=", "7", "3", "7"]
    assert lines[3].split() == ["all", "0", "of", "1", "1", "of", "1"]
    assert rl_report.same(outcome, write(tmp_path / "b", [0.2, 0.4, 0.6, 0.8, 0.9, 1.0], "a"))
    assert not rl_report.same(outcome, write(tmp_path / "c", [0.2, 0.4, 0.6, 0.8, 0.9, 1.0], "b"))
    assert not rl_report.same(outcome, write(tmp_path / "d", [0.2, 0.4, 0.6, 0.8, 0.9, 0.9], "a"))
    picture = tmp_path / "picture.png"
    rl_report.draw([outcome], picture, "title")
    assert picture.read_bytes().startswith(b"\x89PNG")
