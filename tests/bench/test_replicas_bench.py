"""How runs of replicas are compared with one job."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.replicas import paced_gpt, report, run
from scripts import train as train_script
from scripts.trainkit.job import Record, Step

NAME = run.name_of((10, 0))
BATCHES = ("--global-batch-size", "--micro-batch-size")


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
    summary = run.summary([record(one, **how) for one in losses])
    return {"every": every, "after": 0, "seed": 1, **summary}


def result(apart: float, slower: float = 1.0) -> dict[str, list[report.Run]]:
    """Of one job, and of replicas whose loss and time are so far from it."""
    losses = [2.0] * 60
    apart_by = [[x * (1 + apart + by) for x in losses] for by in (-0.01, 0.01)]
    return {
        run.ONE_JOB: [of([losses], None)],
        NAME: [of(apart_by, 10, step_s=slower, pushed=4000)],
    }


def test_replicas_count_by_their_mean() -> None:
    runs = result(0.02, slower=1.5)
    assert report.over(runs, NAME, report.loss) == pytest.approx([0.02])
    assert report.over(runs, NAME, report.step_s) == pytest.approx([0.5])
    assert report.rows(runs)[-1] == [
        *(NAME, "2.0400", "+2.00%", "+2.00%"),
        *("4.0", "1.500", "+50.00%"),
    ]


def test_seeds_are_compared_one_by_one() -> None:
    """Their own losses differ by far more than what training did to them."""
    runs = {
        run.ONE_JOB: [of([[loss] * 60], None) for loss in (1.0, 2.0, 3.0)],
        NAME: [of([[loss] * 60], 10) for loss in (1.01, 2.04, 3.09)],
    }
    assert report.over(runs, NAME, report.loss) == pytest.approx([0.01, 0.02, 0.03])
    cells = report.rows(runs)[-1]
    assert cells[1:4] == ["2.0467", "+2.00% ±2.48%", "+2.00% ±2.48%"]


def test_how_replicas_meet() -> None:
    options = run.parse(["--every", "1,10@200", "--at-most", "10@200=0.01"])
    assert options.settings == {"1": (1, 0), "10@200": (10, 200)}
    assert run.name_of((10, 200)) == "replicas, once in 10 steps after 200"


def test_one_rank_takes_what_all_others_would() -> None:
    options = run.parse(["--replicas", "4", "--ranks", "2", "--batch", "3", "--alone"])
    words = [run.megatron_arguments(one, Path("data"), 1) for one in (options, run.alone(options))]
    sizes = [[dict(pairwise(one))[flag] for flag in BATCHES] for one in words]
    assert sizes == [["24", "3"], ["24", "24"]]
    with pytest.raises(SystemExit):
        run.parse(["--alone", "--model-ranks", "2"])


def test_worlds_lie_on_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(train_script, "on_gpu", lambda: True)
    shown = [run.gpus_of(world, 0, 1)["CUDA_VISIBLE_DEVICES"] for world in range(3)]
    assert shown == ["4", "5", "4"]
    one_job = [run.gpus_of(0, rank, 4) for rank in range(4)]
    assert [found["LOCAL_RANK"] for found in one_job] == ["0", "1", "0", "1"]
    assert {found["CUDA_VISIBLE_DEVICES"] for found in one_job} == {"4,5"}


def test_what_is_exchanged_counts_by_whole_exchanges() -> None:
    """And the loss of the model that all have, in the steps that begin with it."""
    one, mine = [2.0] * 60, [2.0 * (1.01 if at % 10 == 0 else 1.5) for at in range(60)]
    first, exchanged = of([one], None), of([mine], 10)
    exchanged["pushed_bytes"] = [(step // 10) * 500 for step in range(1, 61)]
    assert report.per_step(exchanged, "pushed_bytes") == pytest.approx(50)
    assert report.common_loss(exchanged, first) == pytest.approx(0.01)


def test_what_is_above_its_limit_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "result.json", tmp_path / "curves.png"
    file.write_text(json.dumps({"schema": 2, "meta": {}, "runs": result(0.02, slower=1.1)}))
    shown = ["--from-json", str(file), "--plot", str(picture)]
    assert run.main([*shown, "--at-most", "10=0.03", "--at-most-slower", "10=0.2"]) == 0
    assert picture.stat().st_size > 0
    assert run.main([*shown, "--at-most", "10=0.01", "--at-most-slower", "10=0.05"]) == 1
    told = capsys.readouterr().out
    assert "the loss is +2.00% over that of one job, more than 1.00%" in told
    assert "the time of a step is +10.00% over that of one job, more than 5.00%" in told


def test_sites() -> None:
    rule = run.sites_of("100mbit@50ms")
    assert rule.delay_s == pytest.approx(0.025)
    assert rule.bytes_per_s == pytest.approx(12.5e6)
    assert rule.queue_bytes == pytest.approx(625_000)


def test_a_pace_is_kept() -> None:
    begin = time.monotonic()
    assert paced_gpt.paced(lambda value: value + 1, 0.2)(1) == 2
    assert time.monotonic() - begin >= 0.2


@pytest.mark.parametrize(
    "words",
    [
        *(["--every", "x"], ["--every", "0"], ["--every", "10@x"], ["--sites", "100mbit"]),
        *(["--at-most", "x"], ["--every", "10@5", "--at-most", "10=0.1"]),
    ],
)
def test_bad_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.parse(words)
