"""scripts/rl.py: what it refuses, and a model of the user's. `make rl` and `make rl-layouts` run
it too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import rl
from scripts.trainkit import rl_report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "3", "--tensor", "2"], "--workers 3 is no multiple of --tensor 2"),
        (["--rollout-tensor", "3"], "--workers 2 is no multiple of --rollout-tensor 3"),
        (["--algorithm", "sarsa"], "invalid choice: 'sarsa'"),
        (["--mode", "late"], "invalid choice: 'late'"),
        (["--prompts", "3"], "--prompts 3 cannot be shared by 2 updates of 2 ranks"),
        (["--model", "mine", "--layers", "4"], "--model has its own"),
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


def test_a_model_that_is_nowhere_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hub is off here (`conftest`)."""
    out = ["--out", str(tmp_path / "out")]
    assert rl.main(["--model", "nobody/nothing", *out]) == 1
    assert "error: --model nobody/nothing is no folder, and could" in capsys.readouterr().err
    assert rl.main(["--model", str(tmp_path), *out]) == 1
    assert "is no model's folder: it has no config.json" in capsys.readouterr().err


def make_chat_model(folder: Path) -> Path:
    """A Llama cut as SmolLM2 is (three query heads per key, tied embeddings), with random weights,
    and a tokenizer of bytes with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: n for n, word in enumerate(["<|im_start|>", "<|im_end|>", *letters])}
    raw = Tokenizer(models.BPE(words, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(words),
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_model_of_the_users_own_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_chat_model(tmp_path / "model")
    arguments = ["--model", str(model), "--steps", "2", "--prompts", "4", "--responses", "4"]
    assert rl.main([*arguments, "--rise", "-1", "--out", str(tmp_path / "out")]) == 0
    outcome = rl_report.read(tmp_path / "out/grpo-byteps", "BytePS")
    assert [step.number for step in outcome.steps] == [1, 2]
    assert all(0 < step.mismatch < 0.2 for step in outcome.steps)
    assert set(outcome.backends) == {"BytePS flat"}
    assert "Answer with the number alone." in outcome.after[0].prompt
    assert all(int(sample.wanted) in range(2, 19) for sample in outcome.after)
    assert "2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("steps", "rise", "good"), [(20, 0.19, False), (20, 0.2, True), (3, -0.01, False), (3, 0, True)]
)
def test_the_reward_has_to_rise(steps: int, rise: float, good: bool) -> None:
    outcome: Any = SimpleNamespace(first_reward=0.5, last_reward=0.5 + rise)
    assert rl.check(outcome, rl.parse(["--steps", str(steps)]).rise - 1e-9) is good


@pytest.mark.parametrize("arguments", [["--lora", "8"], ["--model", "mine"]])
def test_of_adapters_and_of_other_models_no_rise_is_asked(arguments: list[str]) -> None:
    assert rl.parse(arguments).rise == 0
