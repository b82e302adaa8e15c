"""Steps with stragglers: what the links allow in closed form, and a short run on emulated ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.stragglers.delays import KINDS, Links, Load, delay, least_seconds, loads
from bench.stragglers.rank import Experiment, Step
from bench.stragglers.report import rows, table

SCRIPT = Path(__file__).resolve().parents[2] / "bench/stragglers/run.py"
LIMIT_S = 300.0
FOUR = Links(workers=4, servers=4, rate=1.0)


def test_without_computing_the_links_need_what_the_cost_model_says() -> None:
    from byteps import cost_model

    at_once = [Load(seconds=0.0)] * 4
    for servers in (2, 4, 8):
        links = Links(workers=4, servers=servers, rate=3.0)
        expected = cost_model.own_machines(4, servers, 12.0, 3.0)
        assert least_seconds("servers", links, 12, 4, at_once) == pytest.approx(expected)
        ring = cost_model.ring(4, 12.0, 3.0)
        assert least_seconds("ring", links, 12, 4, at_once) == pytest.approx(ring)
        shards = Links(workers=4, servers=servers, rate=3.0, shards=True)
        assert least_seconds("ring", shards, 12, 4, at_once) == pytest.approx(ring / 2)


def seen(way: str, kind: str, computing: float, links: Links = FOUR) -> float:
    """Part of the delay, with a tensor of 1 byte in one bucket for each of 8 layers."""
    late, even = loads(kind, 4, computing, 0), loads("balanced", 4, computing, 0)
    least = [least_seconds(way, links, 1, 8, every) for every in (late, even)]
    return (least[0] - least[1]) / delay(late, even)


@pytest.mark.parametrize("way", ["servers", "ring"])
def test_who_starts_late_is_late_by_all_of_it(way: str) -> None:
    assert seen(way, "starts late", 1.0) == pytest.approx(1)


def test_longer_computing_hides_behind_links_that_are_the_limit() -> None:
    # Links that are the limit begin with the first bucket, after 1/3 + 2/3/8 of the computing.
    assert seen("servers", "longer", 0.5) == pytest.approx(5 / 12)
    assert seen("ring", "longer", 0.5) == pytest.approx(5 / 12)
    # A ring is the limit for longer; where computing is, nothing hides.
    assert seen("ring", "longer", 1.0) < seen("servers", "longer", 1.0) < 1
    assert seen("servers", "longer", 4.0) == seen("ring", "longer", 4.0) == pytest.approx(1)


def test_early_pushes_help_only_where_pushes_are_the_limit() -> None:
    few = Links(workers=4, servers=2, rate=1.0)
    assert seen("servers", "starts late", 0.5, few) == pytest.approx(1)
    shards = Links(workers=4, servers=2, rate=1.0, shards=True)
    assert seen("servers", "starts late", 0.5, shards) == pytest.approx(0)


def test_skewed_steps_have_the_work_of_balanced_ones() -> None:
    for step in range(20):
        skewed = loads("skewed", 4, 2.0, step)
        assert sum(load.seconds for load in skewed) == pytest.approx(8.0)
        assert delay(skewed, loads("balanced", 4, 2.0, step)) > 0
        assert skewed == loads("skewed", 4, 2.0, step) != loads("skewed", 4, 2.0, step + 1)
    with pytest.raises(ValueError, match="'lazy' is none of balanced, starts late"):
        loads("lazy", 4, 1.0, 0)


def test_report_compares_with_the_balanced_step_of_the_same_number() -> None:
    experiment = Experiment(
        workers=2, size=8, buckets=2, computing=[1.0], steps=2, shards=False, seed=1
    )
    # Balanced steps take 2 and 4 seconds, and each other kind's a half of its delay more.
    steps = [
        Step(
            computing=1.0,
            kind=kind,
            way=way,
            number=number,
            seconds=2.0 * (number + 1)
            + delay(loads(kind, 2, 1.0, number), loads("balanced", 2, 1.0, number)) / 2,
            wrong=0,
        )
        for kind in KINDS
        for way in ("servers", "ring")
        for number in range(2)
    ]
    found = rows(experiment, Links(workers=2, servers=2, rate=8.0), steps)
    assert [row.kind for row in found[::2]] == list(KINDS)
    assert table(found)[1][:3] == ("1", "balanced", "-")
    assert all(line[4][:4] == line[6][:4] == "0.50" for line in table(found)[2:])
    for row in found:
        assert row.computing == 1.0
        if row.kind == "balanced":
            assert row.seconds == 3.0 and row.seen is None
            continue
        assert row.seen == pytest.approx(0.5)


@pytest.mark.requires("root")
@pytest.mark.parametrize(
    "shards", [[], pytest.param(["--shards"], marks=pytest.mark.thorough)], ids=["all", "shards"]
)
def test_all_sums_of_a_short_run_are_right(tmp_path: Path, shards: list[str]) -> None:
    file = tmp_path / "steps.json"
    command = [sys.executable, str(SCRIPT), "--workers", "2", "--servers", "2", *shards]
    command += ["--size", "256KiB", "--buckets", "4", "--computing", "1", "--steps", "1"]
    ran = subprocess.run(
        [*command, "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "# wrong elements: 0" in ran.stdout
    steps = json.loads(file.read_text())["steps"]
    assert {(step["kind"], step["way"]) for step in steps} == {
        (kind, way) for kind in KINDS for way in ("servers", "ring")
    }
    # 21 ms of computing, and no rank is done before its own.
    assert all(step["seconds"] > 0.02 for step in steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "1"], "there must be two --workers"),
        (["--size", "1000B"], "1000B cannot be cut into 8 buckets"),
        (["--computing", "1", "1"], "name each of --computing once"),
        (["--link", "fast"], "'fast' is not understood"),
    ],
)
def test_bad_usage_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.stragglers import run as rl_stragglers

    with pytest.raises(SystemExit, match="2"):
        rl_stragglers.main(arguments)
    assert message in capsys.readouterr().err
