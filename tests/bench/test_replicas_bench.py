"""A run fails if a comparison exceeds its threshold, or if a sum is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.frameworks import run as frameworks_run
from bench.reducer import run as reducer_bench
from bench.replicas import failures, run
from scripts.trainkit.job import Record, Step

NAME = run.name_of((10, 0))


def record(losses: list[float], *, step_s: float = 1.0, pushed: int = 0) -> Record:
    steps = [
        Step(
            iteration=number,
            loss=loss,
            tokens=10,
            seconds=number * step_s,
            push_pull_mb_per_s=0.0,
            pushed_bytes=number * pushed,
        )
        for number, loss in enumerate(losses, 1)
    ]
    return Record(steps=steps, checksum="x")


def of(losses: list[list[float]], every: int | None, **how: Any) -> dict[str, Any]:
    summary = run.summary([record(losses_of, **how) for losses_of in losses])
    return {"every": every, "after": 0, "seed": 1, **summary}


def result(apart: float, slower: float = 1.0) -> dict[str, list[run.Run]]:
    """Make runs of one job, and of replicas with these differences of loss and time."""
    losses = [2.0] * 60
    apart_by = [[x * (1 + apart + by) for x in losses] for by in (-0.01, 0.01)]
    return {
        run.ONE_JOB: [of([losses], None)],
        NAME: [of(apart_by, 10, step_s=slower, pushed=4000)],
    }


def test_what_is_above_its_limit_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "result.json", tmp_path / "curves.png"
    file.write_text(json.dumps({"schema": 2, "meta": {}, "runs": result(0.02, slower=1.1)}))
    shown = ["--from-json", str(file), "--plot", str(picture)]
    assert run.main([*shown, "--at-most", "10=0.03", "--at-most-slower", "10=0.2"]) == 0
    assert picture.stat().st_size > 0
    assert run.main([*shown, "--at-most", "10=0.01", "--at-most-slower", "10=0.05"]) == 1
    printed = capsys.readouterr().out
    assert "the loss is +2.00% over that of one job, more than 1.00%" in printed
    assert "the time of a step is +10.00% over that of one job, more than 5.00%" in printed


# Kills of servers while replicas train, and their display.


def test_a_long_pause_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    death = {"killed": "server 1", "after_step": 20, "pause_s": 0.4, "back_s": 0.6}
    result = {
        "meta": {},
        "schema": 2,
        "kill": "servers",
        "step_s": 1.0,
        "steps": 40,
        "seconds": 41.0,
        "trained": 1.0,
        "goodput": 0.98,
        "checksums": ["x"],
        "deaths": [{**death, "others_waited_s": None}],
    }
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result))
    assert failures.main(["--from-json", str(file), "--most-pause", "0.5"]) == 0
    head, row, *_ = [line for line in capsys.readouterr().out.splitlines() if line]
    assert head.endswith("replaced after, s")
    assert row.split() == ["server", "1", "20", "0.40", "0.60"]
    assert failures.main(["--from-json", str(file), "--most-pause", "0.3"]) == 1
    assert "a step took 0.40 s longer, which is more than 0.3 s" in capsys.readouterr().out


# bench/frameworks: the figures of made-up launches, and both commands from end to end.


WAYS = ("ddp", "ddp-hook", "hsdp")


def launched(**steps: list[float]) -> dict[str, Any]:
    named = {way.replace("_", "-"): times for way, times in steps.items()}
    return {"steps": named, "sums": dict.fromkeys(named, 7.0)}


LAUNCHES = [
    launched(ddp=[20, 22, 24], ddp_hook=[10, 11, 12], hsdp=[30, 30, 30]),
    launched(ddp=[24, 24, 24], ddp_hook=[10, 10, 90], hsdp=[31, 31, 31]),
]


def test_what_is_slow_or_wrong_is_named() -> None:
    assert not frameworks_run.problems(LAUNCHES, WAYS, 2.2, "same")
    assert frameworks_run.problems(LAUNCHES, WAYS, 2.3, "same") == [
        "ddp-hook: 2.20 is less than 2.3"
    ]
    wrong = [{**LAUNCHES[0], "sums": {**LAUNCHES[0]["sums"], "ddp-hook": 7.1}}]
    assert frameworks_run.problems(wrong, WAYS, None, "same") == [
        "ddp-hook learned 7.100000, ddp 7.000000"
    ]
    assert not frameworks_run.problems(wrong, WAYS, None, "bf16"), "which rounds"


def test_sharded_ways_are_compared_with_the_links() -> None:
    """A step sends two gathers of 16 bits and, over gloo, an all-reduce; over NCCL, a
    reduce-scatter."""
    assert frameworks_run.links_ratio("fsdp-bf16", "cpu") == 64 / 48
    assert frameworks_run.links_ratio("fsdp-int8-gathers", "cuda") == 48 / (3 * 8 * 130 / 128)
    ways = ("fsdp", "fsdp-bf16")
    launch = launched(fsdp=[64, 64], fsdp_bf16=[50, 50])
    assert [row[-2:] for row in frameworks_run.rows([launch], ways)] == [["", ""], ["1.33", "0.96"]]


# bench/reducer/run.py: every operation is right, a broken operation is found, and thresholds apply.


QUICK = ["--partition", "64KiB", "--working-set", "1MiB", "--repeats", "1"]


@pytest.fixture
def build_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which the program is built, instead of the build of `make setup`."""
    monkeypatch.setattr(reducer_bench, "BUILD", tmp_path / "build")
    return tmp_path


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "right", "broken"),
    [
        ("server/reducer.cc", "wide[i] += E::Get(in, i)", "wide[i] -= E::Get(in, i)"),
        ("base/dtype.h", "? nan : rounded", "? nan : ~rounded"),
        ("server/reducer.cc", "inverse = 1 / d", "inverse = 2 / d"),
    ],
    ids=["added", "rounded", "divided"],
)
def test_wrong_results_are_found(
    build_in: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    right: str,
    broken: str,
) -> None:
    overlay = build_in / "overlay" / "byteps"
    for folder in ("base", "server"):
        shutil.copytree(reducer_bench.OVERLAY / "byteps" / folder, overlay / folder)
    source = overlay / file
    text = source.read_text()
    assert right in text
    source.write_text(text.replace(right, broken))
    monkeypatch.setattr(reducer_bench, "OVERLAY", build_in / "overlay")
    assert reducer_bench.main(QUICK) == 1
    wrong = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
    assert any(count not in ("0", "#wrong") for count in wrong)


def reduced(
    seconds: list[float], plain: list[float], type: str = "float32"
) -> reducer_bench.Result:
    return reducer_bench.Result(
        operation="sum += in",
        type=type,
        read=8,
        written=4,
        bytes=12_000_000_000,
        seconds=seconds,
        plain_seconds=plain,
        arithmetic_seconds=[],
        wrong=0,
        level="x86-64-v3",
    )


def test_the_bar_holds_for_gated_types_alone(capsys: pytest.CaptureFixture[str]) -> None:
    options = reducer_bench.parse(["--min-of-limit", "0.7"])
    fast = reduced([2.0, 1.0], [0.8, 3.0])
    slow = reduced([2.0], [1.0])
    other = reduced([2.0], [1.0], "float16")
    assert reducer_bench.report([fast, other], options, {"hardware": "x"}) == 0
    assert reducer_bench.report([fast, slow], options, {"hardware": "x"}) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
    assert lines[1][-5:] == ["12.00", "15.00", "0.80", "ok", "0"]
    assert [line[-2] for line in lines] == ["gate", "ok", "-", "gate", "ok", "MISS"]
