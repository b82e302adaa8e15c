"""Flags that are refused, with what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_byteps_hf.options import TARGETS, LoraOptions, is_asked_for, read


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


def test_reads_its_own_flags_among_others(model: str) -> None:
    argv = ["--lr", "1", "--hf-model", model, "--lora", "--lora-rank", "3", "--bf16"]
    assert is_asked_for(argv) and not is_asked_for(["--lr", "1", "--load", "x"])
    options = read(argv)
    assert str(options.model) == model and options.save is None
    assert options.lora == LoraOptions(rank=3)
    assert options.lora.targets == TARGETS
    assert read(["--hf-model", model]).lora is None
    targets = ["--lora", "--lora-targets", "linear_qkv", "linear_proj"]
    assert read(["--hf-model", model, *targets]).lora == LoraOptions(targets=tuple(targets[2:]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora"], "--hf-save and --lora need --hf-model FOLDER"),
        (["--hf-model", "/nowhere"], "--hf-model /nowhere: no Hugging Face model"),
        (["--hf-model", "MODEL", "--lora-rank", "4"], "--lora-rank needs --lora"),
        (["--hf-model", "MODEL", "--hf-save", "MODEL"], "--hf-save must be another folder"),
    ],
)
def test_refuses(flags: list[str], message: str, model: str) -> None:
    with pytest.raises(ValueError, match=message):
        read([model if flag == "MODEL" else flag for flag in flags])


def test_refuses_weights_in_another_format(model: str) -> None:
    (Path(model) / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"there is no \*\.safetensors file"):
        read(["--hf-model", model])


@pytest.mark.parametrize("flags", [["--lora-rank", "0"], ["--lora-dropout", "1"]])
def test_refuses_values(flags: list[str], model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(["--hf-model", model, "--lora", *flags])
    assert flags[0] in capsys.readouterr().err
