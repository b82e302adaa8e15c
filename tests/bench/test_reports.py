"""What a run leaves: tables, JSON, Markdown, pictures, an exit status."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench import pushpull_bench
from bench.kit import record
from bench.pushpull import samples, suite
from bench.pushpull.document import parts_in
from bench.pushpull.markdown import BEGIN, END, replace_results, results
from bench.pushpull.options import parse
from bench.pushpull.plots import described, draw_overview, parts_of_limit
from bench.pushpull.sets import SETS, choose
from bench.pushpull.tables import ratio_table
from tests.bench.made_up import make_run

DOCS = Path(__file__).resolve().parents[2] / "docs"
REDRAW = (
    "bench/pushpull/suite.py --from-markdown docs/results/figures.md "
    "--chart docs/images/speed.png, by build/venv/bin/python"
)


def test_what_was_measured_is_known_or_said_not_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = record.series_hash()
    assert len(present) == 16 and int(present, 16)
    monkeypatch.setattr(record, "_ROOT", tmp_path)
    (tmp_path / "byteps").mkdir()
    assert record.series_hash() == "not known"
    (tmp_path / "patches/byteps").mkdir(parents=True)
    (tmp_path / "byteps/one.cc").write_text("1")
    assert len(record.series_hash()) == 16


def test_a_ratio_has_its_spread() -> None:
    head, line = ratio_table(make_run())
    assert head[2:] == ("ours", "theirs", "ratio", "min..max", "launches")
    assert line == ("1MiB", "float32", "byteps", "gloo", "1.500", "1.500..1.500", "2")


def test_json_is_read_back_as_it_was(tmp_path: Path) -> None:
    run = make_run(busy={1: 0.9}, wrong=3)
    meta = record.metadata(["--json", "x"])
    path = tmp_path / "new" / "run.json"
    samples.write([run], meta, path)
    assert samples.read(path) == ([run], meta)
    content = json.loads(path.read_text())
    assert content["schema"] == samples.SCHEMA
    assert content["runs"][0]["launches"][0]["measured"][0]["samples_s"] == [1.0, 1.1]
    assert content["runs"][0]["rows"][0]["of_limit"] == 1.0


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"schema": 99}))
    with pytest.raises(ValueError, match="schema 99"):
        samples.read(path)


def test_the_header_says_what_figures_depend_on() -> None:
    text = record.header(record.metadata(["--emulate", "8@1mbit"]), make_run().plan)
    assert all(line.startswith("# ") for line in text.splitlines())
    for word in ("torch", "byteps", "hardware", "cubic", "MTU 9000", "fair queue", "--emulate"):
        assert word in text


def options_of(*arguments: str) -> argparse.Namespace:
    return parse(arguments, "")


def test_a_wrong_result_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert pushpull_bench.report(make_run(), [], options_of(), []) == 0
    assert pushpull_bench.report(make_run(wrong=1), [], options_of(), []) == 1
    assert capsys.readouterr().out.splitlines()[-4].endswith(" 2")


def test_results_replace_those_of_before(tmp_path: Path) -> None:
    document = tmp_path / "doc.md"
    document.write_text(f"# Method\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    replace_results(document, "new")
    assert document.read_text() == f"# Method\n\n{BEGIN}\n\nnew\n\n{END}\n\nafter\n"
    document.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the lines"):
        replace_results(document, "new")


@pytest.mark.parametrize("name", sorted(SETS))
def test_every_bar_of_a_set_is_about_a_case_of_its_plan(name: str) -> None:
    for experiment in choose(name):
        assert experiment.gates
        for gate in experiment.gates:
            assert gate.case in experiment.plan.cases
            if gate.kind in ("ratio", "cpu"):
                assert gate.base in experiment.plan.backends
            assert gate.base_case is None or gate.base_case in experiment.plan.cases


def test_an_unknown_experiment_is_named() -> None:
    with pytest.raises(ValueError, match=r"no experiment 'x', but 4\+4-500mbit"):
        choose("quick", ["x"])


def test_results_say_which_launches_count_and_what_was_missed() -> None:
    experiment = choose("quick")[0]
    run = make_run(busy={1: 0.9}, wrong=1)
    run.plan = experiment.plan
    for launch in run.launches:
        launch.measured = [
            type(launch.measured[0])(**{**launch.measured[0].__dict__, "case": case})
            for case in experiment.plan.cases
        ]
    text = results([(experiment, run)], {"date": "today"})
    assert "- date: today\n" in text
    assert "interleaved: 1; 4+4-500mbit: 1, 1 more on a busy machine\n" in text
    assert "- wrong elements: 8\n" in text
    assert (
        "| 4+4-500mbit | 64MiB float32 | 1000 | 1.074 | gloo | 1500 | 1.500 | 1.500..1.500 |"
        in text
    )
    missed = "32MiB bfloat16: speed over that of gloo 64MiB float32: 1.500, must be >= 2.9."
    assert f"Thresholds met: 4 of 5. MISS: 4+4-500mbit, {missed}" in text


def test_overview_compares_times_with_one_limit(run_dir: Path) -> None:
    # 1 MiB over links of 1 MiB/s: the limit is a second.
    run = make_run({"byteps": [[1.25, 1.25]], "gloo": [[2.5, 2.5]]})
    assert parts_of_limit(run) == pytest.approx({"byteps": 0.8, "gloo": 0.4})
    no_limit = make_run(link_bits=0)
    assert parts_of_limit(no_limit) == {}
    for runs in ([run, run, no_limit], [no_limit], []):
        picture = run_dir / f"{len(runs)}.png"
        draw_overview(runs, picture)
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_documents_chart_shows_its_tables() -> None:
    experiments = parts_in((DOCS / "results/figures.md").read_text())
    by_label = {one.label: one.of_limit for one in experiments}
    # What the links allow, over each one's time: gloo's is 0.963 * 4459 / 6494.
    assert by_label["4+4-500mbit\n256MiB float32"] == pytest.approx(
        {"byteps": 0.963, "gloo": 0.6612}, rel=1e-3
    )
    assert by_label["4 + 4, 10 Gbit/s, GPU\n256 MiB"]["nccl"] == pytest.approx(0.927 / 1.42)
    assert by_label["4 of two GPUs + 4, 10 Gbit/s, GPU\n256 MiB"]["byteps"] == 0.91
    picture = (DOCS / "images/speed.png").read_bytes()
    assert described(experiments).encode() in picture, f"draw it again: {REDRAW}"


def test_a_document_without_results_has_no_chart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.md").write_text("# Nothing\n")
    command = ["--from-markdown", str(tmp_path / "empty.md"), "--chart", str(tmp_path / "a.png")]
    assert suite.main(command) == 1
    assert "there are no results" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()
