"""bench/reducer/run.py: every operation is right, a broken one is found, and thresholds count."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench.kit.plan import DTYPE_BYTES
from bench.reducer import run as reducer_bench

QUICK = ["--partition", "64KiB", "--working-set", "1MiB", "--repeats", "1"]


@pytest.fixture
def build_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program is built here, and not where `make setup` put things."""
    monkeypatch.setattr(reducer_bench, "BUILD", tmp_path / "build")
    return tmp_path


@pytest.mark.thorough
def test_every_type_is_measured_and_right(
    build_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = build_in / "results.json"
    assert reducer_bench.main([*QUICK, "--json", str(written)]) == 0
    results = json.loads(written.read_text())["results"]
    assert {one["type"] for one in results} == set(DTYPE_BYTES)
    assert {one["set"] for one in results} == {"memory", "partition"}
    assert all(one["wrong"] == 0 and one["of_limit"] > 0 for one in results)
    table = capsys.readouterr().out
    assert "# working set: 1MiB" in table and "plain GB/s" in table


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "right", "broken"),
    [
        ("server/reducer.cc", "wide[i] += E::Get(in, i)", "wide[i] -= E::Get(in, i)"),
        ("base/half_words.h", "? nan : rounded", "? nan : ~rounded"),
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
    assert reducer_bench.main([*QUICK, "--types", "float32,bfloat16"]) == 1
    wrong = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
    assert any(count not in ("0", "#wrong") for count in wrong)


def result(
    seconds: list[float],
    plain: list[float],
    *,
    type: str = "float32",
    set: str = "memory",
    operation: str = "sum += in",
) -> reducer_bench.Result:
    return reducer_bench.Result(
        operation=operation,
        type=type,
        set=set,
        read=8,
        written=4,
        bytes=12_000_000_000,
        seconds=seconds,
        plain_seconds=plain,
        wrong=0,
        level="x86-64-v3",
    )


def test_the_bar_holds_for_gated_types_alone(capsys: pytest.CaptureFixture[str]) -> None:
    options = reducer_bench.parse(["--min-of-limit", "0.7"])
    fast = result([2.0, 1.0], [0.8, 3.0])
    slow = result([2.0], [1.0], operation="wide += in")
    other = result([2.0], [1.0], type="int64")
    assert reducer_bench.report([fast, other], options, {"hardware": "x"}) == 0
    assert reducer_bench.report([fast, slow], options, {"hardware": "x"}) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
    assert lines[1][-6:] == ["12.00", "15.00", "0.80", "0.80", "ok", "0"]
    assert [line[-2] for line in lines] == ["gate", "ok", "-", "gate", "ok", "MISS"]
