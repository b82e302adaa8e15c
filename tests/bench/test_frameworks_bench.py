"""bench/frameworks: the figures of made-up launches, and both commands from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.frameworks import calls, run

WAYS = ("ddp", "ddp-hook", "hsdp")


def launched(**steps: list[float]) -> dict[str, Any]:
    named = {way.replace("_", "-"): times for way, times in steps.items()}
    return {"steps": named, "sums": dict.fromkeys(named, 7.0)}


LAUNCHES = [
    launched(ddp=[20, 22, 24], ddp_hook=[10, 11, 12], hsdp=[30, 30, 30]),
    launched(ddp=[24, 24, 24], ddp_hook=[10, 10, 90], hsdp=[31, 31, 31]),
]


def test_medians_of_launches_are_compared() -> None:
    assert run.rows(LAUNCHES, WAYS) == [
        ["ddp", "23.0", "22.0..24.0", "", ""],
        ["ddp-hook", "10.5", "10.0..11.0", "2.20", "2.00..2.40"],
        ["hsdp", "30.5", "30.0..31.0", "", ""],
    ]


def test_what_is_slow_or_wrong_is_named() -> None:
    assert not run.problems(LAUNCHES, WAYS, 2.2, "same")
    assert run.problems(LAUNCHES, WAYS, 2.3, "same") == ["ddp-hook: 2.20 is less than 2.3"]
    wrong = [{**LAUNCHES[0], "sums": {**LAUNCHES[0]["sums"], "ddp-hook": 7.1}}]
    assert run.problems(wrong, WAYS, None, "same") == ["ddp-hook learned 7.100000, ddp 7.000000"]
    assert not run.problems(wrong, WAYS, None, "bf16"), "which rounds"


def test_a_page_gets_the_table_of_its_wire_type(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    marks = {wire: run.BEGIN.format(wire=wire) for wire in ("same", "bf16")}
    page.write_text("".join(f"{mark}\nold\n<!-- end -->\n\n" for mark in marks.values()))
    meta = {"date": "today", "command": "run.py", "hardware": "two cores", "load": "1"}
    for _ in range(2):
        run.rewrite(page, "bf16", meta, [("way", "ms"), ("ddp", "1")])
    text = page.read_text()
    assert text == (
        f"{marks['same']}\nold\n<!-- end -->\n\n{marks['bf16']}\n\n"
        "date: today; command: run.py; hardware: two cores; load: 1\n\n"
        "| way | ms |\n| --- | --- |\n| ddp | 1 |\n\n<!-- end -->\n\n"
    )
    with pytest.raises(ValueError, match="has no '<!-- made by"):
        run.rewrite(page, "fp16", meta, [])


@pytest.mark.slow
@pytest.mark.requires("root")
@pytest.mark.thorough
def test_steps_from_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    """One rank per host, and two."""
    small = ["--workers", "2", "--servers", "2", "--link", "1gbit", "--layers", "2"]
    small += ["--width", "256", "--steps", "1", "--launches", "1"]
    for more in ([], ["--ranks-per-host", "2", "--ways", "hsdp,hsdp-backend"]):
        assert run.main([*small, *more]) == 0
        assert "what was learned is the same" in capsys.readouterr().out


@pytest.mark.slow
def test_calls_from_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert calls.main(["--calls", "5", "--max-us", "1e9"]) == 0
    assert "all_reduce takes" in capsys.readouterr().out
    assert calls.main(["--calls", "1", "--max-us=-1e9"]) == 1
    assert "MISSED" in capsys.readouterr().out
