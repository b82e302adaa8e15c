"""How runs are compared: replicas with one job, wire types, frameworks, the servers' additions."""

from __future__ import annotations

import json
import shutil
import time
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.frameworks import calls
from bench.frameworks import run as frameworks_run
from bench.kit import gpt
from bench.kit.plan import DTYPE_BYTES
from bench.kit.processes import Processes
from bench.quality import run as quality_run
from bench.reducer import run as reducer_bench
from bench.replicas import failures, paced_gpt, run
from bench.replicas.failures import REPLACED, WAITS, ServerDeaths, Servers
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


def result(apart: float, slower: float = 1.0) -> dict[str, list[run.Run]]:
    """Of one job, and of replicas whose loss and time are so far from it."""
    losses = [2.0] * 60
    apart_by = [[x * (1 + apart + by) for x in losses] for by in (-0.01, 0.01)]
    return {
        run.ONE_JOB: [of([losses], None)],
        NAME: [of(apart_by, 10, step_s=slower, pushed=4000)],
    }


def test_replicas_count_by_their_mean() -> None:
    runs = result(0.02, slower=1.5)
    assert run.over(runs, NAME, run.loss) == pytest.approx([0.02])
    assert run.over(runs, NAME, run.step_s) == pytest.approx([0.5])
    assert run.rows(runs)[-1] == [
        *(NAME, "2.0400", "+2.00%", "+2.00%"),
        *("4.0", "1.500", "+50.00%"),
    ]


def test_seeds_are_compared_one_by_one() -> None:
    """Their own losses differ by far more than what training did to them."""
    runs = {
        run.ONE_JOB: [of([[loss] * 60], None) for loss in (1.0, 2.0, 3.0)],
        NAME: [of([[loss] * 60], 10) for loss in (1.01, 2.04, 3.09)],
    }
    assert run.over(runs, NAME, run.loss) == pytest.approx([0.01, 0.02, 0.03])
    cells = run.rows(runs)[-1]
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
    assert run.per_step(exchanged, "pushed_bytes") == pytest.approx(50)
    assert run.common_loss(exchanged, first) == pytest.approx(0.01)


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


# How servers are killed while replicas train, and what is shown of it.


OPTIONS = Namespace(servers=2, spare=3, spare_servers=1, kills=3, kill_every=10.0)


class FakeProcesses(Processes):
    """Logs that the test writes."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.killed: list[str] = []

    def text_of(self, title: str) -> str:
        return self.texts[title]

    def kill(self, title: str) -> None:
        self.killed.append(title)


def place(rank: int) -> str:
    return f"{WAITS}: ... this is server {rank}, for 2 workers"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Two servers, of which the first one has rank 1; the replica has made its first steps."""
    processes = FakeProcesses({"scheduler": "", "server-0": place(1), "server-1": place(0)})

    def start(index: int, *args: Any) -> int:
        processes.texts[f"server-{index}"] = "listening"
        return 0

    monkeypatch.setattr(failures, "start_server", start)
    servers = Servers(processes, 2, {})
    return Namespace(
        servers=servers, texts=processes.texts, killed=processes.killed, lives=[Namespace(ends=[])]
    )


def test_servers_are_killed_in_turn_while_one_waits(job: Namespace) -> None:
    deaths = ServerDeaths(OPTIONS)
    deaths(job, 0.0)
    assert "server-2" not in job.texts, "the first steps are without deaths"
    job.lives[0].ends = [0.0] * 3
    deaths(job, 1.0)
    assert job.texts["server-2"] == "listening" and not job.killed
    job.texts["server-2"] = WAITS
    deaths(job, 2.0)
    assert job.killed == ["server-1"], "the one with rank 0"
    assert job.texts["server-3"] == "listening"
    job.texts["server-3"] = WAITS
    deaths(job, 20.0)
    assert job.killed == ["server-1"], "nobody has its place yet"
    job.texts["server-2"] = place(0)
    job.texts["scheduler"] = REPLACED
    deaths(job, 20.5)
    assert job.killed == ["server-1", "server-0"]
    assert [death["killed"] for death in deaths.all] == ["server 0", "server 1"]
    assert deaths.all[0]["back_s"] == 18.5


def test_intervals_are_kept(job: Namespace) -> None:
    deaths = ServerDeaths(OPTIONS)
    job.lives[0].ends = [0.0] * 3
    deaths(job, 0.0)
    job.texts["server-2"] = WAITS
    deaths(job, 0.5)
    job.texts |= {"server-2": place(0), "server-3": WAITS, "scheduler": REPLACED}
    deaths(job, 10.0)
    assert len(job.killed) == 1
    deaths(job, 10.5)
    assert len(job.killed) == 2


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


# How runs in several wire types are compared.


def losses(apart: list[float]) -> dict[str, list[list[float]]]:
    """Of bf16, and of int8, whose seeds are so far apart from it."""
    base = [[2.0 + seed + 1 / (step + 1) for step in range(150)] for seed in range(len(apart))]
    other = [[value * (1 + by) for value in one] for one, by in zip(base, apart, strict=True)]
    return {"bf16": base, "int8": other}


def test_seeds_are_compared_in_pairs() -> None:
    given = losses([0.01, 0.03])
    assert quality_run.differences(given, "int8") == pytest.approx([0.01, 0.03])
    mean, low, high = gpt.interval(quality_run.differences(given, "int8"))
    assert mean == pytest.approx(0.02)
    # Half the standard deviation of two, times Student's t of one degree of freedom.
    assert (low, high) == pytest.approx((0.02 - 0.12706, 0.02 + 0.12706))


def test_of_one_seed_steps_are_compared() -> None:
    values = quality_run.differences(losses([0.01]), "int8")
    assert len(values) == quality_run.LAST
    assert gpt.interval(values)[1] == pytest.approx(0.01)


def test_a_difference_above_its_limit_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "result.json", tmp_path / "curves.png"
    file.write_text(json.dumps({"schema": 1, "meta": {}, "losses": losses([0.01, 0.01])}))
    shown = ["--from-json", str(file), "--plot", str(picture)]
    assert quality_run.main([*shown, "--at-most", "int8=0.02"]) == 0
    assert picture.stat().st_size > 0
    assert quality_run.main([*shown, "--at-most", "int8=0.002"]) == 1
    assert "int8: the loss is +1.000% above bf16's, more than 0.20%" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--types", "int8"], ["--types", "bf16,int2"], ["--at-most", "x"]]
)
def test_bad_usage_of_quality(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        quality_run.parse(words)


# bench/frameworks: the figures of made-up launches, and both commands from end to end.


WAYS = ("ddp", "ddp-hook", "hsdp")


def launched(**steps: list[float]) -> dict[str, Any]:
    named = {way.replace("_", "-"): times for way, times in steps.items()}
    return {"steps": named, "sums": dict.fromkeys(named, 7.0)}


LAUNCHES = [
    launched(ddp=[20, 22, 24], ddp_hook=[10, 11, 12], hsdp=[30, 30, 30]),
    launched(ddp=[24, 24, 24], ddp_hook=[10, 10, 90], hsdp=[31, 31, 31]),
]


def test_medians_of_launches_are_compared() -> None:
    assert frameworks_run.rows(LAUNCHES, WAYS) == [
        ["ddp", "23.0", "22.0..24.0", "", ""],
        ["ddp-hook", "10.5", "10.0..11.0", "2.20", "2.00..2.40"],
        ["hsdp", "30.5", "30.0..31.0", "", ""],
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


def test_a_page_gets_the_table_of_its_wire_type(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    marks = {wire: frameworks_run.BEGIN.format(wire=wire) for wire in ("same", "bf16")}
    page.write_text("".join(f"{mark}\nold\n<!-- end -->\n\n" for mark in marks.values()))
    meta = {"date": "today", "command": "run.py", "hardware": "two cores", "load": "1"}
    for _ in range(2):
        frameworks_run.rewrite(page, "bf16", meta, [("way", "ms"), ("ddp", "1")])
    text = page.read_text()
    assert text == (
        f"{marks['same']}\nold\n<!-- end -->\n\n{marks['bf16']}\n\n"
        "date: today; command: run.py; hardware: two cores; load: 1\n\n"
        "| way | ms |\n| --- | --- |\n| ddp | 1 |\n\n<!-- end -->\n\n"
    )
    with pytest.raises(ValueError, match="has no '<!-- made by"):
        frameworks_run.rewrite(page, "fp16", meta, [])


@pytest.mark.slow
@pytest.mark.requires("root")
@pytest.mark.thorough
def test_steps_from_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    """One rank per host, and two."""
    small = ["--workers", "2", "--servers", "2", "--link", "1gbit", "--layers", "2"]
    small += ["--width", "256", "--steps", "1", "--launches", "1"]
    for more in ([], ["--ranks-per-host", "2", "--ways", "hsdp,hsdp-backend"]):
        assert frameworks_run.main([*small, *more]) == 0
        assert "what was learned is the same" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.slow
def test_calls_from_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert calls.main(["--calls", "5", "--max-us", "1e9"]) == 0
    assert "all_reduce takes" in capsys.readouterr().out
    assert calls.main(["--calls", "1", "--max-us=-1e9"]) == 1
    assert "MISSED" in capsys.readouterr().out


# bench/reducer/run.py: every operation is right, a broken one is found, and thresholds count.


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
    assert reducer_bench.main([*QUICK, "--types", "float32,bfloat16"]) == 1
    wrong = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
    assert any(count not in ("0", "#wrong") for count in wrong)


def reduced(
    seconds: list[float],
    plain: list[float],
    *,
    type: str = "float32",
    set: str = "memory",
    operation: str = "sum += in",
    arithmetic: list[float] | None = None,
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
        arithmetic_seconds=arithmetic or [],
        wrong=0,
        level="x86-64-v3",
    )


def test_a_cpu_that_computes_slowly_is_compared_with_its_own_arithmetic() -> None:
    """0.67 of what memory feeds it with, and faster than a plain loop of the same arithmetic."""
    options = reducer_bench.parse(["--min-of-limit", "0.7"])
    average = "sum = (sum + in) / 3"
    alone = reduced([1.5], [1.0], operation=average)
    computed = reduced([1.5], [1.0], operation=average, arithmetic=[1.8, 1.6])
    assert reducer_bench.report([alone], options, {"hardware": "x"}) == 1
    assert reducer_bench.report([computed], options, {"hardware": "x"}) == 0
    slow = reduced([3.0], [1.0], operation=average, arithmetic=[1.8, 1.6])
    assert reducer_bench.report([slow], options, {"hardware": "x"}) == 1


def test_the_bar_holds_for_gated_types_alone(capsys: pytest.CaptureFixture[str]) -> None:
    options = reducer_bench.parse(["--min-of-limit", "0.7"])
    fast = reduced([2.0, 1.0], [0.8, 3.0])
    slow = reduced([2.0], [1.0], operation="wide += in")
    other = reduced([2.0], [1.0], type="int64")
    assert reducer_bench.report([fast, other], options, {"hardware": "x"}) == 0
    assert reducer_bench.report([fast, slow], options, {"hardware": "x"}) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
    assert lines[1][-6:] == ["12.00", "15.00", "0.80", "0.80", "ok", "0"]
    assert [line[-2] for line in lines] == ["gate", "ok", "-", "gate", "ok", "MISS"]
