"""scripts/train.py --hf-model: text to tokens, a loss and a sample before and after, files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.prepare_data import DataError, prepare, tokens_of
from tests.layouts.hugging_face.models import make
from tests.layouts.hugging_face.runs import tensors

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1500.0
TEXT = "".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(400))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Llama with a tokenizer of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "model"
    make("llama", folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens(["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = tokenizer.token_to_id("<end>")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_text_becomes_the_models_tokens(model: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from tokenizers import Tokenizer

    source = tmp_path / "a.txt"
    source.write_text("7 and 8 make 15.\nGrüße\n")
    tokens = tokens_of(model)
    dataset = prepare([source], tmp_path / "out", 1000, tokens)
    reader = IndexedDataset(str(dataset.prefix))  # owns the memory of what it returns
    stored = reader[0].tolist()
    assert (
        stored[-1] == tokens.end == json.loads((model / "config.json").read_text())["eos_token_id"]
    )
    assert Tokenizer.from_file(str(model / "tokenizer.json")).decode(stored[:-1]) == (
        source.read_text()
    )
    assert dataset.tokens == len(stored) < len(source.read_bytes())
    assert prepare([source], tmp_path / "out", 1000, tokens).found
    # Bytes of the same text are another dataset.
    assert prepare([source], tmp_path / "out", 1000).prefix != dataset.prefix
    (model / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json: no such file"):
        tokens_of(model)


# Four processes import everything anew, which a busy machine makes minutes of.
@pytest.mark.timeout(LIMIT_S + 100)
def test_trains_adapters_and_shows_what_they_did(model: Path, run_dir: Path) -> None:
    source = run_dir / "sums.txt"
    source.write_text(TEXT)
    out = run_dir / "out"
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "train.py")]
    command += ["--hf-model", str(model), "--lora", "--steps", "8", "--data", str(source)]
    command += ["--data-cache", str(run_dir / "cache"), "--out", str(out)]
    command += ["--", "--lr", "2e-2", "--seq-length", "64"]
    environment = {**os.environ, "MEGATRON_CPU": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "loss on text that was held out, by transformers: " in run.stdout
    assert "the model goes on, after:" in run.stdout
    losses = json.loads((out / "losses.json").read_text())["runs"][0]["losses"]
    assert len(losses) == 8 and losses[-1] < losses[0]
    written = out / "byteps" / "model"
    before, after = tensors(model), tensors(written)
    changed = [name for name in before if not before[name].equal(after[name])]
    # Adapters lie on the linear layers: embeddings and norms are as they were.
    assert changed and all(name.endswith("_proj.weight") for name in changed)
    assert (written / "tokenizer.json").is_file()
    assert (written / "adapter" / "adapter_config.json").is_file()
