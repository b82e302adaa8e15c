"""Recipes as arguments: out of tests and scripts of a checkout; and the page about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.recipekit import megatron, page, shell
from scripts.recipekit.features import FEATURES, row_of, rows_of_results, used
from scripts.recipekit.outcome import Outcome

SCRIPT = """#!/bin/bash
set -e
GPUS_PER_NODE=4
NUM_NODES=${2:+3}
WORLD=$(($GPUS_PER_NODE * $NUM_NODES))
cd /nowhere && mkdir made; echo text > made.txt; /bin/touch made.too
[ -f /no/such/file ] || exit 1
MODEL_ARGS=(
    --num-layers $WORLD   # as many as ranks
    --spec "a b"
)
DISTRIBUTED="--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES"
torchrun $DISTRIBUTED pretrain_gpt.py ${MODEL_ARGS[@]} --data "$1"
"""
LISTED = """
export MODEL_OPTIONS=" --num-layers 2 --seed ${SEED} --load $LOAD"
"""
TOLD = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 2
  --bf16: true
  --spec: "[a b]"
  --pattern: "([1]+[0])"
  --message: two words
  --save: ${PLACE}
"""
PRODUCTS = """
spec:
  nodes: 2
  gpus: 4
  platforms: dgx_gb200
  script: '"TRAINING_SCRIPT_PATH=pretrain_gpt.py"'
products:
  - test_case: [small]
"""


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_script_says_what_it_would_start_and_starts_nothing(tmp_path: Path) -> None:
    path = _write(tmp_path / "train.sh", SCRIPT)
    (one,) = shell.started(path, tmp_path)
    assert (one.script, one.hosts, one.gpus) == ("pretrain_gpt.py", 3, 4)
    assert one.arguments == ("--num-layers", "12", "--spec", "a", "b", "--data", "8")
    assert [file.name for file in tmp_path.iterdir()] == ["train.sh"]


def test_a_script_that_lists_arguments_for_another_one(tmp_path: Path) -> None:
    (one,) = shell.started(_write(tmp_path / "model.sh", LISTED), tmp_path)
    assert one.script == ""
    assert one.arguments[-6:] == ("--num-layers", "2", "--seed", "8", "--load", "8")
    assert shell.started(_write(tmp_path / "none.sh", "ls\n"), tmp_path) == []


def test_functional_tests_and_examples_of_a_checkout(tmp_path: Path) -> None:
    cases = tmp_path / "tests/functional_tests/test_cases/gpt"
    _write(cases / "small/model_config.yaml", TOLD)
    _write(cases / "asks/model_config.yaml", f"MODE: inference\n{TOLD}")
    _write(tmp_path / "tests/test_utils/recipes/h100/gpt.yaml", PRODUCTS)
    (test,) = megatron.functional(tmp_path)
    assert test.words == (
        *("--num-layers", "2", "--bf16", "--spec", "a", "b", "--pattern", "([1]+[0])"),
        *("--message", "two words", "--save", "/given/PLACE"),
    )
    assert (test.name, test.hosts, test.gpus, test.architecture) == ("gpt/small", 2, 4, 10)
    assert test.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    _write(tmp_path / "examples/gpt/train.sh", SCRIPT)
    _write(tmp_path / "examples/gpt/run_inference.sh", SCRIPT)
    _write(tmp_path / "examples/gpt/part.sh", "OTHER_ARGS=(--seed 1)")
    assert [one.name for one in megatron.examples(tmp_path)] == ["gpt/train.sh"]


def test_features_name_layouts() -> None:
    names = [feature.name for feature in FEATURES]
    assert len(set(names)) == len(names)
    setup = {"te": False, "tensor": 2, "sharded": True, "instances": 1, "gradients": 4}
    assert used(setup) == ("local layers", "tensor parallelism", "distributed optimizer")
    by_name = {feature.name: feature for feature in FEATURES}
    tensor = by_name["tensor parallelism"]
    assert row_of(tensor, {"tp2-dp2-overlap"}) == "tp2-dp2-overlap"
    assert row_of(tensor, {"dp2"}) == ""


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    marks = "".join(f"<!-- {mark}: made -->\nold\n<!-- end -->\n" for mark in page.MARKS)
    _write(tmp_path / "results/recipes.md", f"# Recipes\n{marks}The end.\n")
    _write(tmp_path / "results/correctness.md", "| layout | ok |\n| --- | --- |\n| dp2 | yes |\n")
    return tmp_path


def test_three_counts_that_are_not_mixed(docs: Path) -> None:
    assert "dp2" in rows_of_results(docs)
    outcomes = {
        "examples": [
            Outcome(name="run", hosts=1, features=("local layers",)),
            Outcome(name="goes", hosts=4, reaches_servers=True, most_hosts=4, features=("mxfp8",)),
            Outcome(name="no", hosts=1, refused="--use-dpu-reduce does not work with --x: y",
                    optimizer_refused="--use-dpu-reduce does not work with --x: y"),
            Outcome(name="odd", hosts=1, not_read="what | is /some/where/this at https://a.b"),
        ]
    }  # fmt: skip
    file = docs / "results/recipes.md"
    page.write(file, outcomes, {"examples": "Megatron-LM 1.2.3"})
    text = file.read_text()
    assert (
        "| examples | Megatron-LM 1.2.3 | 3 | 2 (66.7 %) | 2 (66.7 %) | 1 | 1 | 1 (33.3 %) |"
        in text
    )
    assert "| local layers | dp2 | 1 |" in text and "| mxfp8 | accepted, never run | 1 |" in text
    assert "| examples | `--use-dpu-reduce` | --x: y | 1 |" in text
    assert "| examples | not read | what / is this at the hub | 1 |" in text
    assert "old" not in text and text.endswith("The end.\n")
    page.write(file, outcomes, {"examples": "Megatron-LM 1.2.3"})
    assert file.read_text() == text
    file.write_text("# Recipes\n")
    with pytest.raises(ValueError, match="no mark <!-- counts:"):
        page.write(file, outcomes, {"examples": "x"})
