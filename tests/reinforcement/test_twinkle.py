"""Twinkle, unchanged, trains the same bits through BytePS as through all-reduce."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.children import Spawned, end_all, last_lines

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400.0


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with a tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*letters, "<pad>", "<end>"])}
    raw = Tokenizer(models.BPE(vocab=words, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<pad>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    made.save_pretrained(folder)
    return folder


def run(kind: str, *, through_byteps: bool, model: Path, out: Path) -> None:
    """Train on two ranks."""
    out.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-W", "ignore", *launcher, "-m", "tests.reinforcement.twinkle_rank"]
    arguments = [kind, str(int(through_byteps)), str(model), str(out)]
    environment = {**os.environ, "MODELSCOPE_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    process = Spawned("twinkle", [*command, *arguments], environment, out, cwd=out)
    try:
        process.wait(LIMIT_S)
    finally:
        end_all([process], 10.0)
    assert process.status == 0, last_lines(process.log, 60)
    assert ("BytePS flat" in process.text) == through_byteps, last_lines(process.log, 60)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["whole", "lora"])
def test_the_same_bits(kind: str, qwen: Path, tmp_path: Path) -> None:
    import torch

    ours, theirs = tmp_path / "byteps", tmp_path / "all-reduce"
    for out in (ours, theirs):
        run(kind, through_byteps=out == ours, model=qwen, out=out)
    for rank in range(2):
        one: dict[str, Any] = torch.load(ours / f"{rank}.pt")
        other = torch.load(theirs / f"{rank}.pt")
        assert one.keys() == other.keys() and one
        assert all("lora" in name for name in one) == (kind == "lora")
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(one[name], torch.load(ours / "0.pt")[name]) for name in one)
