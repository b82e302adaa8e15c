"""scripts/progress.py, recipes as arguments (scripts/recipekit), and merged traces of torch.

tests/multiproc/test_timeline.py has BytePS's traces.
"""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_byteps_ray import profiling
from scripts import children, progress, train
from scripts.children import captured
from scripts.recipekit import features, megatron
from scripts.recipekit.features import Outcome, rows_of_results

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/progress.py"

LATEST_S = 60.0


def wait_for(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LATEST_S
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_log_gets_lines() -> None:
    log = io.StringIO()
    with progress.Progress("bench", total=5, unit="launches", stream=log, every_s=0.01) as shown:
        shown.update("launch 2 gloo", done=3)
        wait_for(lambda: "3 of 5 launches: launch 2 gloo\n" in log.getvalue())
        shown.step()
        wait_for(lambda: "4 of 5 launches: launch 2 gloo\n" in log.getvalue())
        shown.say("p50 3 ms")
    lines = log.getvalue().splitlines()
    assert "p50 3 ms" in lines
    assert all(line.startswith("bench: ") for line in lines if line != "p50 3 ms")


def test_nothing_is_left_of_a_command_that_is_ended(tmp_path: Path) -> None:
    here = tmp_path / "pid"
    command = [SCRIPT, "--name", "it", "--log", tmp_path / "log", "--"]
    # A shell that waits for a child, like scripts do.
    program = f"sleep 600 & echo $! >{here}.new; mv {here}.new {here}; wait; true"
    running = subprocess.Popen([sys.executable, *map(str, command), "sh", "-c", program])
    wait_for(here.exists)
    running.terminate()
    assert running.wait(LATEST_S) == 143
    pid = int(here.read_text())
    wait_for(lambda: not runs(pid))


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("echo one; echo two", 0, "two\n"),
        ("echo one; exit 7", 7, ""),
        ("kill -9 $$", 137, ""),
    ],
)
def test_the_script(tmp_path: Path, program: str, status: int, said: str) -> None:
    command = [SCRIPT, "--name", "it", "--log", tmp_path / "log", "--show-end", "1", "--"]
    done = captured([sys.executable, *map(str, command), "sh", "-c", program], LATEST_S)
    assert (done.returncode, done.stdout) == (status, said)
    if status == 7:
        assert "it FAILED" in done.stderr and "one" in done.stderr


# Recipes as arguments, read from a checkout's tests and scripts, and the page about them.


RECIPE = """#!/bin/bash
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
    path = _write(tmp_path / "train.sh", RECIPE)
    (started,) = megatron.started(path, tmp_path)
    assert (started.script, started.hosts, started.gpus) == ("pretrain_gpt.py", 3, 4)
    assert started.arguments == ("--num-layers", "12", "--spec", "a", "b", "--data", "8")
    assert [file.name for file in tmp_path.iterdir()] == ["train.sh"]


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

    _write(tmp_path / "examples/gpt/train.sh", RECIPE)
    _write(tmp_path / "examples/gpt/run_inference.sh", RECIPE)
    _write(tmp_path / "examples/gpt/part.sh", "OTHER_ARGS=(--seed 1)")
    assert [example.name for example in megatron.examples(tmp_path)] == ["gpt/train.sh"]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    marks = "".join(f"<!-- {mark}: made -->\nold\n<!-- end -->\n" for mark in features.MARKS)
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
    features.write(file, outcomes, {"examples": "Megatron-LM 1.2.3"})
    text = file.read_text()
    assert (
        "| examples | Megatron-LM 1.2.3 | 3 | 2 (66.7 %) | 2 (66.7 %) | 1 | 1 | 1 (33.3 %) |"
        in text
    )
    assert "| local layers | dp2 | 1 |" in text and "| mxfp8 | accepted, never run | 1 |" in text
    assert "| examples | `--use-dpu-reduce` | --x: y | 1 |" in text
    assert "| examples | not read | what / is this at the hub | 1 |" in text
    assert "old" not in text and text.endswith("The end.\n")
    features.write(file, outcomes, {"examples": "Megatron-LM 1.2.3"})
    assert file.read_text() == text
    file.write_text("# Recipes\n")
    with pytest.raises(ValueError, match="no mark <!-- counts:"):
        features.write(file, outcomes, {"examples": "x"})


# Merging of torch's traces; tests/multiproc/test_timeline.py has BytePS's.


def _of_torch(file: Path, rank: int, base_ns: int) -> Path:
    """Write a trace like torch.profiler: an operation of 250 us, half a second after the start."""
    process = {"pid": 77, "tid": 77}
    arrow = {"ph": "s", "id": 3, "cat": "fwdbwd", "name": "fwdbwd", **process}
    end = {"ph": "i", "name": "Record Window End", "pid": "Traces", "tid": 1, "ts": 600_000}
    events = [
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "mm", **process, "ts": 500_000.125, "dur": 250.0},
        {**arrow, "ts": 500_001},
        end,
    ]
    trace = {"baseTimeNanoseconds": base_ns, "traceEvents": events}
    trace["distributedInfo"] = {"rank": rank}
    with gzip.open(file, "wt") as stream:
        json.dump(trace, stream)
    return file


def test_merging_with_traces_of_torch(tmp_path: Path) -> None:
    """Times of both traces match, and processes and arrows of different files stay apart."""
    moment = 1_790_000_000 * 10**9  # since 1970, in nanoseconds
    ours = tmp_path / "byteps-worker-0.json"
    partition = {"ph": "b", "cat": "partition", "name": "g.0", "pid": 1, "tid": 0}
    # During the first rank's operation.
    events = [{**partition, "ts": moment / 1000 + 1_500_100}]
    ours.write_text(json.dumps({"traceEvents": events}))
    files = [
        _of_torch(tmp_path / "a.json.gz", 0, moment + 10**9),
        ours,
        _of_torch(tmp_path / "b.json.gz", 1, moment + 2 * 10**9),
    ]
    merged = profiling.merge(files)["traceEvents"]
    assert len(merged) == 4 + 1 + 4 + 2  # "Traces" had no name
    first, second = (event for event in merged if event["name"] == "mm")
    (push,) = (event for event in merged if event["name"] == "g.0")
    assert (first["ts"], second["ts"]) == (500_000.125, 1_500_000.125)
    assert first["ts"] < push["ts"] < first["ts"] + first["dur"]
    assert push["pid"] == 1
    names = {e["pid"]: e["args"]["name"] for e in merged if e["name"] == "process_name"}
    assert names[first["pid"]] == "torch, rank 0: python"
    assert names[second["pid"]] == "torch, rank 1: python"
    assert len(names) == 4
    assert len({event["id"] for event in merged if event["ph"] == "s"}) == 2
    (tmp_path / "cut.json.gz").write_bytes(files[0].read_bytes()[:50])
    with pytest.raises(ValueError, match=r"cut.json.gz is no timeline"):
        profiling.merge([tmp_path / "cut.json.gz"])


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("1", 1), ("0,3", 2)])
def test_gpus_that_are_hidden_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    (tmp_path / "0000:01:00.0").touch()  # the driver still knows a GPU
    monkeypatch.setattr(children, "GPUS_OF_DRIVER", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("MEGATRON_CPU", raising=False)
    assert children.count_gpus() == count
    assert train.on_gpu() == (count > 0)
