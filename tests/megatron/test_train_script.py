"""scripts/train.py, from data (scripts/prepare_data.py) to summary, and its failures."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import prepare_data, train
from scripts.children import captured
from scripts.prepare_data import END_OF_DOCUMENT, DataError, Dataset, prepare
from scripts.trainkit.job import (
    Record,
    Result,
    Step,
    largest_difference,
    same_parameters,
    table,
)
from tests.pages import lines_with

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 500.0
SMALL = ["--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"]


def _command(tree: Path, folder: Path, *options: str) -> list[str]:
    source = folder / "text.txt"
    source.write_text("".join(f"line {n} of the text\n" for n in range(500)))
    script = [sys.executable, str(ROOT / "scripts" / "train.py"), "--tree", str(tree)]
    script += ["--out", str(folder / "out"), "--data-cache", str(folder / "data")]
    return [*script, "--data", str(source), *options]


def _environment(tree: Path) -> dict[str, str]:
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "MEGATRON_CPU": "1"}


def test_train_and_compare(tree: Path, run_dir: Path, warm_python: str) -> None:
    run = captured(
        [*_command(tree, run_dir, "--steps", "6", "--compare"), "--", *SMALL],
        LIMIT_S,
        env={**_environment(tree), "PYTHON_EXEC": warm_python},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "largest difference of the loss over 6 steps: 0.0; final parameters: the same" in (
        run.stdout
    )
    for head in ("backend", "workers", "servers", "first loss", "last loss", "tokens/s"):
        assert head in run.stdout
    out = run_dir / "out"
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    ours, theirs = json.loads((out / "losses.json").read_text())["runs"]
    assert ours["losses"] == theirs["losses"] and len(ours["losses"]) == 6
    assert (ours["backend"], theirs["backend"]) == ("BytePS", "all-reduce")


EXAMPLE = ROOT / "scripts" / "examples" / "train_qwen_3b.sh"


def _example(tree: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = _environment(tree) | {"PROGRAM": str(tree / "pretrain_dpu_gpt.py")}
    del environment["MEGATRON_CPU"]  # The example must detect it itself.
    return captured([EXAMPLE, *words], LIMIT_S, env={**environment, **settings})


def test_the_example_gains_through_servers(tree: Path) -> None:
    run = _example(tree, CHECK="25")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "--use-dpu-reduce: accepted" in run.stdout
    assert "3,085.9 million per rank in 16 bits, reduced over 32 ranks" in run.stdout
    assert "change nothing: what runs is 1.50 x as fast as plain Megatron" in run.stdout


def test_the_example_with_a_tiny_model(tree: Path, run_dir: Path, warm_python: str) -> None:
    words = ["--nproc-per-node", "2", "--", "--train-iters", "3", "--dpu-reduce-backend", "flat"]
    words += ["--tensorboard-dir", str(run_dir), "--wandb-project", "a", "--wandb-exp-name", "b"]
    words += ["--wandb-save-dir", str(run_dir)]
    program, trained = ROOT / "tests/megatron/with_writers.py", tree / "pretrain_dpu_gpt.py"
    programs = {"PROGRAM": str(program), "TRAINED_PROGRAM": str(trained)}
    run = _example(tree, *words, SIZE="tiny", PYTHON_EXEC=warm_python, **programs)
    assert run.returncode == 0, run.stdout + run.stderr
    said = run.stdout + run.stderr
    assert re.search(r"BytePS flat .* yes: asked for", said), said
    losses = [float(loss) for loss in re.findall(r"lm loss: ([\d.E+-]+)", said)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    _demand_metrics(said, "tensorboard")
    _demand_metrics(said, "wandb")


@pytest.mark.slow
def test_the_complete_line_of_the_quick_start(tree: Path, run_dir: Path, warm_python: str) -> None:
    (words,) = lines_with(r"^MEGATRON_CPU=1 torchrun ")
    options, program, flags = words[2:4], words[4], words[5:]
    launcher = [warm_python, "-m", "torch.distributed.run", "--standalone", *options]
    env = {**_environment(tree), "TMPDIR": str(run_dir)}
    run = captured([*launcher, str(tree / Path(program).name), *flags], LIMIT_S, env=env)
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    assert said.count("lm loss: ") == 5 and "BytePS flat" in said


def _demand_metrics(said: str, writer: str) -> None:
    """Check that a writer got each iteration's values, next to Megatron's own."""
    metrics = re.findall(rf"^{writer} (\d+) byteps/(\w+) (\S+)$", said, re.M)
    values = {(int(step), name): float(value) for step, name, value in metrics}
    sent = {values[step, "sent_bytes_per_step"] for step in (1, 2, 3)}
    # The gradients are bf16. Their number is rounded up, because buckets are padded.
    assert len(sent) == 1 and sent.pop() > 100_000, values
    for step in (1, 2, 3):
        assert values[step, "throughput_bytes_per_s"] > 0
        assert values[step, "exposed_s_per_step"] > 0
        assert (values[step, "members"], values[step, "reconnections"]) == (2, 0)
    assert f"{writer} 3 batch-size " in said


@pytest.mark.thorough
def test_a_failing_worker_is_shown(tree: Path, run_dir: Path) -> None:
    arguments = ["--workers", "1", "--steps", "2", "--", *SMALL, "--num-attention-heads", "3"]
    run = captured(_command(tree, run_dir, *arguments), LIMIT_S, env=_environment(tree))
    assert run.returncode == 1
    assert "error: training ended with exit status 1" in run.stderr
    assert "args.hidden_size % args.num_attention_heads" in run.stderr, "the worker's own words"


def _in_session(leader: int) -> list[int]:
    """Return processes in the session of this one, or with this parent."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and leader in (int(fields[1]), int(fields[3])):
            pids.append(int(entry.parent.name))
    return pids


def _wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} in time"
        time.sleep(0.1)


@pytest.mark.thorough
def test_an_interrupt_ends_every_process(tree: Path, run_dir: Path) -> None:
    command = _command(tree, run_dir, "--steps", "1000000", "--", *SMALL)
    with (run_dir / "train.log").open("wb") as log:
        process = subprocess.Popen(command, env=_environment(tree), stdout=log, stderr=log)
    try:
        steps = run_dir / "out" / "byteps" / "steps.jsonl"
        _wait_for(lambda: steps.exists() or process.poll() is not None, "first step")
        assert process.poll() is None, "it ended by itself"
        (torchrun,) = _in_session(process.pid)
        workers = [pid for pid in _in_session(torchrun) if pid != torchrun]
        assert len(workers) >= 2
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
    finally:
        process.kill()
        process.wait()
    _wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "end of workers")
    assert not Path(f"/proc/{torchrun}").exists()


def test_bad_usage_and_a_tree_that_is_not_there(run_dir: Path) -> None:
    bad = [sys.executable, str(ROOT / "scripts" / "train.py"), "--workers", "0"]
    assert subprocess.run(bad, capture_output=True, timeout=LIMIT_S).returncode == 2
    refused = [["--spares", "1"], ["--address", "auto"], ["--lose-rank-at", "5"], ["--lora"]]
    for flag in refused:
        with pytest.raises(SystemExit) as stop:
            train.parse(flag)
        assert stop.value.code == 2
    assert train.parse(["--mode", "ray", "--lose-rank-at", "5"]).spares == 1
    assert train.parse(["--mode", "ray"]).spares == 0
    assert train.parse([]).steps > train.parse(["--hf-model", "smollm2"]).steps
    missing = captured(_command(run_dir / "nowhere", run_dir), LIMIT_S)
    assert missing.returncode == 1
    assert "is no patched Megatron-LM: run `make setup`" in missing.stderr


def _result(
    losses: list[float], checksum: str = "a", backend: str = "BytePS", workers: int = 2
) -> Result:
    steps = [
        Step(
            iteration=number + 1,
            loss=loss,
            tokens=100,
            seconds=float(number),
            push_pull_mb_per_s=float(number),
        )
        for number, loss in enumerate(losses)
    ]
    return Result(
        backend=backend, workers=workers, servers=1, record=Record(steps=steps, checksum=checksum)
    )


def test_the_report_counts_right() -> None:
    ours, theirs = _result([5.0, 4.0, 3.0]), _result([5.0, 4.0, 3.0 + 2**-50], "b", "all-reduce")
    assert largest_difference(ours, ours) == 0.0
    assert largest_difference(ours, theirs) == 2**-50
    assert same_parameters(ours, ours) and not same_parameters(ours, theirs)
    assert ours.record.tokens_per_s() == 100.0
    assert ours.push_pull_mb_per_s == 1.5
    rows = table([ours, theirs]).splitlines()
    assert rows[2].split() == ["BytePS", "2", "1", "5.0000", "4.0000", "100", "1.5"]
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("ours", "theirs", "options", "code", "said"),
    [
        ([5.0, 2.0], [5.0, 2.0], ["--threshold", "4"], 0, "loss: fell below 4.0000"),
        ([5.0, 4.9], [5.0, 4.9], ["--threshold", "0.5"], 1, "loss: did NOT fall below 0.5000"),
        ([5.0, 6.0], [5.0, 6.0], [], 1, "loss: did NOT fall below 5.0000"),
        ([5.0, 2.0], [5.0, 2.0 + 2**-50], [], 1, "must give the same bits"),
        ([5.0, 2.0], [5.0, 2.1], ["--workers", "3"], 0, "largest difference of the loss"),
        ([5.0, 2.0], [5.0, 2.1], ["--optimizer", "servers"], 0, "last ten differs by 1.41%"),
        ([5.0, 2.0], [5.0, 3.0], ["--optimizer", "servers"], 1, "it may differ by 2%"),
        ([5.0, 2.0], [5.1, 2.0], ["--optimizer", "servers"], 1, "must be the same"),
    ],
    ids=[
        *("good", "threshold", "first-loss", "unequal", "unequal-but-three"),
        *("servers", "servers-apart", "servers-first-loss"),
    ],
)
def test_exit_status(
    tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ours: list[float],
    theirs: list[float],
    options: list[str],
    code: int,
    said: str,
) -> None:
    def canned(options: argparse.Namespace, prefix: Path, *, backend: str) -> Result:
        losses = ours if backend == "BytePS" else theirs
        return _result(losses, backend=backend, workers=options.workers)

    monkeypatch.setattr(train, "train", canned)
    words = _command(tree, tmp_path, "--steps", "2", "--compare", *options)[2:]
    assert train.main(words) == code
    assert said in capsys.readouterr().out


# scripts/prepare_data.py: Megatron's reader returns the bytes of the text.


LIMIT = 1 << 20


def _documents(dataset: Dataset) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    stored = IndexedDataset(str(dataset.prefix))
    assert list(stored.document_indices) == list(range(len(stored) + 1))
    return [stored[i].tolist() for i in range(len(stored))]


def _text_folder(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"second\n")
    (folder / "a.txt").write_text("first: é and 日本\n")
    (folder / "sub" / "c.txt").write_bytes(b"third")
    return folder


def test_round_trip(tmp_path: Path) -> None:
    folder = _text_folder(tmp_path / "in")
    dataset = prepare([folder], tmp_path / "out", LIMIT)
    texts = [(folder / name).read_bytes() for name in ("a.txt", "b.txt", "sub/c.txt")]
    assert _documents(dataset) == [[*text, END_OF_DOCUMENT] for text in texts]
    assert dataset.documents == 3
    assert dataset.tokens == sum(map(len, texts)) + 3
    assert not dataset.reused


def test_the_same_content_is_found_again(tmp_path: Path) -> None:
    first = prepare([_text_folder(tmp_path / "in")], tmp_path / "out", LIMIT)
    before = first.prefix.with_name(first.prefix.name + ".bin").stat().st_mtime_ns
    again = prepare([_text_folder(tmp_path / "copy")], tmp_path / "out", LIMIT)
    assert again.reused
    assert again.prefix == first.prefix
    assert first.prefix.with_name(first.prefix.name + ".bin").stat().st_mtime_ns == before


def test_a_half_written_dataset_is_made_again(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("whole")
    dataset = prepare([source], tmp_path / "out", LIMIT)
    binary = dataset.prefix.with_name(dataset.prefix.name + ".bin")
    binary.write_bytes(binary.read_bytes()[:3])
    again = prepare([source], tmp_path / "out", LIMIT)
    assert not again.reused
    assert _documents(again) == [[*b"whole", END_OF_DOCUMENT]]


def test_max_bytes_cuts_the_last_document(tmp_path: Path) -> None:
    dataset = prepare([_text_folder(tmp_path / "in") / "b.txt"], tmp_path / "out", 3)
    assert _documents(dataset) == [[*b"sec", END_OF_DOCUMENT]]


def test_a_folder_is_read_by_name_and_without_what_is_no_text(tmp_path: Path) -> None:
    folder = _text_folder(tmp_path / "in")
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".hidden").write_text("hidden")
    (folder / "tests").mkdir()
    (folder / "tests" / "t.txt").write_text("test")
    (folder / "link.txt").symlink_to(folder / "a.txt")
    assert prepare([folder], tmp_path / "out", LIMIT).documents == 3


def test_the_standard_library_is_the_default(tmp_path: Path) -> None:
    dataset = prepare([], tmp_path / "out", 50_000)
    documents = _documents(dataset)
    first = (prepare_data.standard_library() / "__future__.py").read_bytes()
    assert bytes(documents[0][:-1]) == first
    assert dataset.tokens == 50_000 + dataset.documents


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or folder"),
        (b"\xff\xfe", "not text"),
        (b"a\0b", "not text"),
        (b"", "no text in 1 files: all empty"),
    ],
    ids=["missing", "no-utf8", "zeros", "empty"],
)
def test_errors_of_a_named_file(tmp_path: Path, content: bytes | None, message: str) -> None:
    source = tmp_path / "source.txt"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare([source], tmp_path / "out", LIMIT)
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no files"):
        prepare([tmp_path], tmp_path / "out", LIMIT)


def test_command_line(tmp_path: Path) -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        script = str(ROOT / "scripts" / "prepare_data.py")
        return captured([sys.executable, script, *arguments], 240)

    source = tmp_path / "text.txt"
    source.write_text("text")
    prefix = prepare([source], tmp_path / "out", LIMIT).prefix
    made = call(str(source), "--out", str(tmp_path / "out"))
    assert (made.returncode, made.stdout) == (0, f"{prefix}\n")
    assert made.stderr == "found: 1 documents, 5 tokens\n"

    missing = call(str(tmp_path / "nothing"))
    assert missing.returncode == 1
    assert missing.stderr == f"error: {tmp_path / 'nothing'}: no such file or folder\n"
    assert call("--max-bytes", "0").returncode == 1
    assert call("--unknown").returncode == 2
