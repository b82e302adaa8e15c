"""verl's Megatron engine and Twinkle: BytePS reduces gradients to the bits of all-reduce."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.children import Spawned, end_all, last_lines
from scripts.trainkit import rl_task

from .engine_rank import BACKENDS, LAYOUTS
from .twinkle_rank import Row

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 2700.0
"""Limit in seconds: minutes on an idle machine, many more on a busy machine."""


def run(name: str, model: Path, out: Path) -> str:
    """Run all engines of a layout on its ranks, and get their log."""
    ranks = str(LAYOUTS[name].ranks)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command = [sys.executable, "-W", "ignore", *launcher, "-m", "tests.reinforcement.engine_rank"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BYTEPS_EMBEDDED_SERVERS": "1"}
    process = Spawned("verl", [*command, name, str(model), str(out)], environment, out, cwd=out)
    try:
        process.wait(LIMIT_S)
    finally:
        end_all([process], 10.0)
    assert process.status == 0, last_lines(process.log, 80)
    return process.text


def assert_same(tensors: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    import torch

    assert tensors.keys() == other.keys() and tensors
    different = [name for name in tensors if not torch.equal(tensors[name], other[name])]
    assert not different, different


def optimizer_values(checkpoint: Path) -> dict[str, Any]:
    """Load the optimizer's saved fp32 parameters and moments by name."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    reader = FileSystemReader(checkpoint)
    names = reader.read_metadata().state_dict_metadata
    loaded = _load_state_dict_from_keys(set(names), storage_reader=reader)
    return {name: value for name, value in loaded.items() if torch.is_tensor(value)}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] if name != "dp2" else []) for name in LAYOUTS],
)
def test_a_resumed_engine_computes_the_same_bits(name: str, tmp_path: Path) -> None:
    import torch

    model = rl_task.make_model(tmp_path / "model", **LAYOUTS[name].model)
    out = tmp_path / "out"
    out.mkdir()
    log = run(name, model, out)
    assert "BytePS flat" in log, last_lines(out / "verl.log", 60)
    for rank in range(LAYOUTS[name].ranks):
        seen = {backend: torch.load(out / f"{backend}-{rank}.pt") for backend in BACKENDS}
        assert_same(seen["byteps"]["last"], seen["all-reduce"]["last"])
        for tensors in seen.values():
            assert_same(tensors["resumed"], tensors["last"])
            assert any(
                not torch.equal(tensors["first"][key], tensors["last"][key])
                for key in tensors["last"]
            )
    ours, theirs = (
        optimizer_values(next(out.glob(f"{backend}-saved/**/optim*/dist_ckpt")))
        for backend in ("servers", "all-reduce")
    )
    assert any(key.startswith("optimizer.state.param.") for key in ours), list(ours)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-5, msg=key)


TWINKLE_LIMIT_S = 400.0


def make_qwen(folder: Path, row: Row) -> Path:
    """Write a tiny model with a tokenizer, with as many layers as the row needs."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=row.pp * row.vpp if row.vpp > 1 else 2,
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


def run_twinkle(row: Row, *, through_byteps: bool, model: Path, out: Path) -> None:
    """Train on the row's ranks."""
    out.mkdir()
    launcher = []
    if row.mode == "local":
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(row.ranks)]
    program = ["-m", "tests.reinforcement.twinkle_rank", row.json()]
    command = [sys.executable, "-W", "ignore", *launcher, *program]
    arguments = [str(int(through_byteps)), str(model), str(out)]
    environment = {
        **os.environ,
        "MODELSCOPE_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # Ray's sockets need a short path.
        "RAY_FOLDER": tempfile.mkdtemp(prefix="twinkle-"),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    process = Spawned("twinkle", [*command, *arguments], environment, out, cwd=out)
    try:
        process.wait(TWINKLE_LIMIT_S)
    finally:
        end_all([process], 10.0)
        shutil.rmtree(environment["RAY_FOLDER"], ignore_errors=True)
    assert process.status == 0, last_lines(process.log, 60)
    assert ("BytePS flat" in process.text) == through_byteps, last_lines(process.log, 60)


TWINKLE_ROWS = [
    # Each kind, mode and parallelism occurs once.
    Row(kind="lora", tp=2),
    Row(kind="tenants", pp=2),
    Row(mode="ray"),
    Row(dp=1, cp=2),
    Row(pp=2, vpp=2),
    *(
        pytest.param(row, marks=pytest.mark.thorough)
        for row in (
            Row(),
            Row(kind="lora"),
            Row(kind="tenants"),
            Row(tp=2),
            Row(pp=2),
            Row(mode="ray", kind="tenants", tp=2),
        )
    ),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", TWINKLE_ROWS, ids=str)
def test_the_same_bits_by_twinkle(row: Row, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    qwen = make_qwen(tmp_path / "qwen", row)
    ours, theirs = tmp_path / "byteps", tmp_path / "all-reduce"
    for out in (ours, theirs):
        run_twinkle(row, through_byteps=out == ours, model=qwen, out=out)
    for adapter in row.adapters:
        saved = [
            load_file(next((out / (adapter or "whole")).glob("*.safetensors")))
            for out in (ours, theirs)
        ]
        assert saved[0].keys() == saved[1].keys() and saved[0]
        assert all(torch.equal(values, saved[1][name]) for name, values in saved[0].items())
    for rank in range(row.ranks if row.mode == "local" else 0):
        our_tensors: dict[str, Any] = torch.load(ours / f"{rank}.pt")
        other = torch.load(theirs / f"{rank}.pt")
        assert our_tensors.keys() == other.keys() and our_tensors
        assert all("lora" in name for name in our_tensors) == (row.kind != "whole")
        assert all(torch.equal(our_tensors[name], other[name]) for name in our_tensors)
