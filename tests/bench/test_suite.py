"""The set of experiments: recorded, shown, written into a document, judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.kit import record
from bench.kit.errors import LaunchError
from bench.kit.plan import Plan
from bench.pushpull import suite
from bench.pushpull.experiment import Experiment
from bench.pushpull.gates import Gate
from bench.pushpull.markdown import BEGIN, END
from bench.pushpull.sets import SETS
from bench.pushpull.summary import Run
from tests.bench.made_up import make_run

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results" / "figures.md"


def experiment(name: str, low: float) -> Experiment:
    plan = make_run().plan
    gates = [Gate(kind="ratio", case=plan.cases[0], low=low)]
    return Experiment(name=name, why="it is made up", plan=plan, gates=gates)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two experiments, 1.5 times as fast as gloo; the names of those that ran."""
    names: list[str] = []

    def run_plan(plan: Plan, name: str, deadline: float | None) -> Run:
        names.append(name)
        run = make_run()
        run.name, run.plan = name, plan
        return run

    set_up = [experiment("easy", 1.4), experiment("hard", 1.6)]
    monkeypatch.setitem(SETS, "quick", lambda: set_up)
    monkeypatch.setattr(suite, "run_plan", run_plan)
    return names


@pytest.mark.parametrize(("only", "status"), [(["easy"], 0), (["hard"], 1), (["no"], 2), ([], 1)])
def test_exit_status(measured: list[str], only: list[str], status: int) -> None:
    assert suite.main(["--only", *only] if only else []) == status
    if status != 2:
        assert measured == (only or ["easy", "hard"])


def test_a_failed_launch_does_not_stop_the_rest(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    works: Callable[..., Run] = suite.run_plan

    def run_plan(plan: Plan, name: str, deadline: float | None) -> Run:
        if name == "easy":
            raise LaunchError("server-0 fell over")
        return works(plan, name, deadline)

    monkeypatch.setattr(suite, "run_plan", run_plan)
    assert suite.main([]) == 1
    captured = capsys.readouterr()
    assert "easy FAILED: server-0 fell over" in captured.err
    assert "no results of: easy" in captured.err
    assert "## hard" in captured.out


def test_a_record_is_reported_like_a_measurement(
    measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, document = tmp_path / "record.json", tmp_path / "doc.md"
    document.write_text(f"{BEGIN}\n{END}\n")
    assert suite.main(["--json", str(record), "--markdown", str(document)]) == 1
    first, shown = document.read_text(), capsys.readouterr().out
    assert "| easy | 1MiB float32 |" in first
    assert "MISS: hard, 1MiB float32: speed over that of gloo: 1.500, must be >= 1.6." in first
    document.write_text(f"{BEGIN}\n{END}\n")
    assert suite.main(["--from-json", str(record), "--markdown", str(document)]) == 1
    assert document.read_text() == first
    assert capsys.readouterr().out == shown
    assert measured == ["easy", "hard"]


def test_a_record_of_another_set_is_refused(
    measured: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = tmp_path / "record.json"
    suite.main(["--json", str(record)])
    changed = experiment("easy", 1.4)
    changed = Experiment(**{**changed.__dict__, "plan": make_run(link_bits=1).plan})
    monkeypatch.setitem(SETS, "quick", lambda: [changed])
    assert suite.main(["--from-json", str(record)]) == 1
    assert "recorded for another set" in capsys.readouterr().err


def test_the_documentation_has_a_place_for_the_results() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert text.index(BEGIN) < text.index(END)


def test_a_record_is_gone_on_with(measured: list[str], tmp_path: Path) -> None:
    words = ["--json", str(tmp_path / "record.json"), "--resume"]
    assert suite.main([*words, "--only", "hard"]) == 1
    assert suite.main([*words, "--only", "easy"]) == 0
    assert measured == ["hard", "easy"]
    assert suite.main(words) == 1
    assert measured == ["hard", "easy"]
    assert (
        suite.main(["--from-json", words[1]]) == 1
    )  # of the one that must miss, not of a lost one


def test_another_engine_begins_another_record(
    measured: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--json", str(tmp_path / "record.json"), "--resume", "--only", "easy"]
    assert suite.main(words) == 0
    monkeypatch.setattr(record, "series_hash", lambda: "another")
    assert suite.main(words) == 1
    assert measured == ["easy"]
    assert "cannot be resumed: its byteps is" in capsys.readouterr().err


def test_a_budget_that_is_used_up_begins_nothing(
    measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite.main(["--budget", "-1"]) == 1
    assert measured == []
    assert "easy: not begun, since --budget is used up" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["fast", "fast-gpu"])
def test_fast_links_need_processors_and_gpus(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(15))
    assert suite.main(["--set", name]) == 2
    assert "1+1-loopback needs 16 cores, and there are 15" in capsys.readouterr().err
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused = suite.demand_hardware
    if name == "fast":
        refused(SETS[name]())
    else:
        with pytest.raises(ValueError, match="4\\+4-10gbit needs a GPU"):
            refused(SETS[name]())
