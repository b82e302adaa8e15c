"""Hugging Face to Megatron and back: in every layout, fully and by adapters.

Also by the training script, and under Ray.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants as hub_constants

from bench.ray_failures.cases import CASES, Case, Runner, pool_settings, problems
from megatron_byteps_hf.options import TARGETS, LoraOptions, is_asked_for, read
from megatron_byteps_ray.cluster import Pool
from megatron_byteps_ray.settings import Settings, preload_for
from scripts.children import captured
from scripts.prepare_data import DataError, prepare, tokens_of
from tests.layouts.hugging_face.runs import (
    ADAPTER,
    KINDS,
    LAYOUTS,
    STEPS,
    Layout,
    compare,
    make,
    make_model,
    same,
    tensors,
    train,
)
from tests.layouts.table import named
from tests.layouts.under_ray.modes import (
    arguments_of,
    run_locally,
    run_under_ray,
    warm_pool,
)
from tests.layouts.under_ray.modes import (
    compare as compare_modes,
)
from tests.layouts.under_ray.rows import CELLS, LORA


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout(layout: Layout, lora: bool, run_dir: Path, models: Path, data: list[str]) -> None:
    outcome = compare(layout, run_dir / "jobs", models, data, lora=lora)
    assert not outcome.problems()
    assert (outcome.trained < 0.5) == lora


# Adapters: trained parameters, sent bytes, and recomputed layers.


PLAIN, RECOMPUTED = named(LAYOUTS, ["dp2", "dp2-recompute"])


def _seen(
    layout: Layout, run_dir: Path, models: Path, data: list[str], name: str, **options: Any
) -> Any:
    model = make_model(layout.model, models)
    job = train(layout, model, run_dir / name, data, lora=True, through_byteps=True, **options)
    return job.result(0)


def test_frozen_parameters_never_reach_byteps(run_dir: Path, models: Path, data: list[str]) -> None:
    seen = _seen(PLAIN, run_dir, models, data, "job")
    parameters = seen.training.parameters
    adapters = [value for name, value in parameters.items() if ".adapter." in name]
    elements = sum(value.numel() for value in adapters)
    assert elements == seen.trained < sum(value.numel() for value in parameters.values()) / 2
    # Four layers with four adapters each, of two matrices.
    assert len(adapters) == 4 * 4 * 2
    # The engine counts the bytes that it sends. It sends 4 bytes per element of the adapters in a
    # step, and no more.
    assert seen.training.pushed_bytes == 4 * elements * STEPS
    assert seen.training.pulled_bytes == 4 * elements * STEPS


def test_recomputed_layers_give_adapters_their_gradients(
    run_dir: Path, models: Path, data: list[str]
) -> None:
    plain = _seen(PLAIN, run_dir, models, data, "plain")
    recomputed = _seen(RECOMPUTED, run_dir, models, data, "recomputed")
    assert not recomputed.without_gradient
    assert [s.loss for s in recomputed.training.steps] == [s.loss for s in plain.training.steps]
    # The failure that this test guards against: a recomputed layer has a frozen input, so autograd
    # never requests the layer's gradients.
    unmended = _seen(RECOMPUTED, run_dir, models, data, "unmended", mended=False)
    assert len(unmended.without_gradient) == 4 * 4 * 2


@pytest.mark.parametrize("layout", KINDS, ids=lambda layout: layout.name)
def test_kinds_of_adapters(layout: Layout, run_dir: Path, models: Path, data: list[str]) -> None:
    outcome = compare(layout, run_dir / "jobs", models, data, lora=True)
    assert not outcome.problems()
    assert outcome.trained < 0.5
    # Adapters on experts of several ranks are merged, not written for peft.
    assert (outcome.adapter_logits is None) == (layout.ep > 1)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("dp2-experts", "--lora-kind dora has no adapters on experts"),
        ("tp2-dp2", "--lora-kind dora needs --tensor-model-parallel-size 1"),
    ],
)
def test_dora_where_it_would_be_wrong_is_refused(
    layout: str, message: str, run_dir: Path, models: Path, data: list[str]
) -> None:
    row = replace(named(LAYOUTS, [layout])[0], extra=("--lora-kind", "dora"))
    model = make_model(row.model, models)
    job = train(row, model, run_dir / "job", data, lora=True, through_byteps=False, fails=True)
    assert message in job.logs()


def test_what_contradicts_the_model_is_refused(
    run_dir: Path, models: Path, data: list[str]
) -> None:
    model = make_model(PLAIN.model, models)
    for extra, message in (
        (("--hidden-size", "32"), "--hidden-size 32 contradicts --hf-model"),
        (("--lora-targets", "nothing"), "--lora-targets nothing: no such layer"),
    ):
        layout = replace(PLAIN, extra=extra)
        folder = run_dir / extra[1]
        job = train(layout, model, folder, data, lora=True, through_byteps=False, fails=True)
        assert message in job.logs()


# Flags that are refused, with advice.


@pytest.fixture
def empty_model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


def test_reads_its_own_flags_among_others(empty_model: str) -> None:
    argv = ["--lr", "1", "--hf-model", empty_model, "--lora", "--lora-rank", "3", "--bf16"]
    assert is_asked_for(argv) and not is_asked_for(["--lr", "1", "--load", "x"])
    options = read(argv)
    assert str(options.model) == empty_model and options.save is None
    assert options.lora == LoraOptions(rank=3)
    assert options.lora.targets == TARGETS
    assert read(["--hf-model", empty_model]).lora is None
    targets = ["--lora", "--lora-targets", "linear_qkv", "linear_proj"]
    assert read(["--hf-model", empty_model, *targets]).lora == LoraOptions(
        targets=tuple(targets[2:])
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora"], "--hf-save and --lora need --hf-model MODEL"),
        (["--hf-model", "org/none"], "--hf-model org/none: there is no such folder, and the hub"),
        (["--hf-model", "/nowhere"], "--hf-model /nowhere: no Hugging Face model"),
        (["--hf-model", "MODEL", "--lora-rank", "4"], "--lora-rank needs --lora"),
        (["--hf-model", "MODEL", "--hf-save", "MODEL"], "--hf-save must be another folder"),
    ],
)
def test_unsupported_models_and_flags_are_refused(
    flags: list[str], message: str, empty_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=message):
        read([empty_model if flag == "MODEL" else flag for flag in flags])


def test_a_name_on_the_hub_is_found_in_the_cache(
    empty_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_name = tmp_path / "models--org--name"
    (of_name / "refs").mkdir(parents=True)
    (of_name / "refs" / "main").write_text("abc")
    (of_name / "snapshots").mkdir()
    Path(empty_model).rename(of_name / "snapshots" / "abc")
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path))
    assert read(["--hf-model", "org/name"]).model == of_name / "snapshots" / "abc"


def test_refuses_weights_in_another_format(empty_model: str) -> None:
    (Path(empty_model) / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"there is no \*\.safetensors file"):
        read(["--hf-model", empty_model])


@pytest.mark.parametrize("flags", [["--lora-rank", "0"], ["--lora-dropout", "1"]])
def test_arguments_with_bad_values_are_refused(
    flags: list[str], empty_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read(["--hf-model", empty_model, "--lora", *flags])
    assert flags[0] in capsys.readouterr().err


# scripts/train.py --hf-model: text to tokens, a loss and a sample before and after, files.


ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1500.0
TEXT = "".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(400))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Llama with its own tokenizer."""
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
    reader = IndexedDataset(str(dataset.prefix))  # owns the memory of its results
    stored = reader[0].tolist()
    assert (
        stored[-1] == tokens.end == json.loads((model / "config.json").read_text())["eos_token_id"]
    )
    assert Tokenizer.from_file(str(model / "tokenizer.json")).decode(stored[:-1]) == (
        source.read_text()
    )
    assert dataset.tokens == len(stored) < len(source.read_bytes())
    assert prepare([source], tmp_path / "out", 1000, tokens).reused
    # The same text with other bytes is another dataset.
    assert prepare([source], tmp_path / "out", 1000).prefix != dataset.prefix
    (model / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json: no such file"):
        tokens_of(model)


# The four processes import everything again. This takes minutes on a busy machine.
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
    run = captured(command, LIMIT_S, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "loss on text that was held out, by transformers: " in run.stdout
    assert "the model goes on, after:" in run.stdout
    losses = json.loads((out / "losses.json").read_text())["runs"][0]["losses"]
    assert len(losses) == 8 and losses[-1] < losses[0]
    written = out / "byteps" / "model"
    before, after = tensors(model), tensors(written)
    changed = [name for name in before if not before[name].equal(after[name])]
    # Adapters are on the linear layers: embeddings and norms are unchanged.
    assert changed and all(name.endswith("_proj.weight") for name in changed)
    assert (written / "tokenizer.json").is_file()
    assert (written / "adapter" / "adapter_config.json").is_file()


# Hugging Face models under Ray: the same script, and a job with adapters that loses a rank.


_THROUGH_SERVERS = ("--use-dpu-reduce", "--dpu-reduce-backend", "flat")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings of the pool: two ranks and a spare."""
    preload = preload_for(["--hf-model", "any"])
    return pool_settings(tmp_path_factory.mktemp("pool"), spares=1, preload=preload)


@pytest.fixture(scope="module")
def pool(settings: Settings) -> Iterator[Pool]:
    """Actors that both tests share."""
    with warm_pool(settings) as pool:
        yield pool


def test_adapters_in_both_modes(
    pool: Pool, settings: Settings, run_dir: Path, models: Path, data: list[str]
) -> None:
    cell = next(cell for cell in CELLS if (cell.name, cell.trained) == ("cp2", LORA))
    arguments = arguments_of(cell, data, models)
    local = run_locally(cell, run_dir / "local", arguments)
    ray = run_under_ray(cell, run_dir / "ray", arguments, pool, settings)
    outcome = compare_modes(local, ray)
    assert outcome.differences == [] and outcome.problems == []
    assert (outcome.groups, outcome.sums) == (1, 1)


def test_a_job_with_adapters_survives_a_lost_rank(
    pool: Pool, settings: Settings, run_dir: Path, models: Path
) -> None:
    model = make_model("llama", models)
    layout = Layout(name="dp2", model="llama", ranks=2)
    case = Case(
        title="",
        faults=CASES["actor"].faults,
        blames=CASES["actor"].blames,
        model=["--hf-model", str(model), *layout.arguments(lora=True), "--mock-data"],
        arguments=[*_THROUGH_SERVERS, "--lora-dropout", "0.1", "--hf-save", "{folder}/model"],
    )
    runner = Runner(pool, settings, run_dir / "jobs")
    outcome, whole = runner.run("lost", case), runner.uninterrupted(case)
    assert problems(case, outcome, whole) == []
    # The written model is the same as without the loss, and differs from the original.
    written, wanted = outcome.folder / "model", whole.folder / "model"
    assert same(written, wanted) and same(written / ADAPTER, wanted / ADAPTER)
    assert not same(written, model)
