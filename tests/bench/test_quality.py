"""How runs in several wire types are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.kit import gpt
from bench.quality import run


def losses(apart: list[float]) -> dict[str, list[list[float]]]:
    """Of bf16, and of int8, whose seeds are so far apart from it."""
    base = [[2.0 + seed + 1 / (step + 1) for step in range(150)] for seed in range(len(apart))]
    other = [[value * (1 + by) for value in one] for one, by in zip(base, apart, strict=True)]
    return {"bf16": base, "int8": other}


def test_seeds_are_compared_in_pairs() -> None:
    given = losses([0.01, 0.03])
    assert run.differences(given, "int8") == pytest.approx([0.01, 0.03])
    mean, low, high = gpt.interval(run.differences(given, "int8"))
    assert mean == pytest.approx(0.02)
    # Half the standard deviation of two, times Student's t of one degree of freedom.
    assert (low, high) == pytest.approx((0.02 - 0.12706, 0.02 + 0.12706))


def test_of_one_seed_steps_are_compared() -> None:
    values = run.differences(losses([0.01]), "int8")
    assert len(values) == run.LAST
    assert gpt.interval(values)[1] == pytest.approx(0.01)


def test_a_difference_above_its_limit_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "result.json", tmp_path / "curves.png"
    file.write_text(json.dumps({"schema": 1, "meta": {}, "losses": losses([0.01, 0.01])}))
    shown = ["--from-json", str(file), "--plot", str(picture)]
    assert run.main([*shown, "--at-most", "int8=0.02"]) == 0
    assert picture.stat().st_size > 0
    assert run.main([*shown, "--at-most", "int8=0.002"]) == 1
    assert "int8: the loss is +1.000% above bf16's, more than 0.20%" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--types", "int8"], ["--types", "bf16,int2"], ["--at-most", "x"]]
)
def test_bad_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.parse(words)
