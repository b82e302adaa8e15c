"""The tables of layouts (tests/layouts): rows in a document, the cells that are run, and what is
made of the arguments of Megatron's functional tests.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import cast

import pytest

from scripts.progress import Progress
from tests.layouts import functional_tests, ray_layouts, rl_layouts
from tests.layouts.functional import arguments
from tests.layouts.functional.arguments import Value
from tests.layouts.functional.rows import CASES, QUICK
from tests.layouts.gpt import layout, runs, updates
from tests.layouts.gpt.layout import Report
from tests.layouts.job import JobFailed
from tests.layouts.table import Table, line, run_cells

ROOT = Path(__file__).resolve().parents[2]
TABLE = Table(begin="<!-- errors -->", head=("layout", "error"), align="lr", keys=("a", "b", "c"))
DOCUMENT = """# All

<!-- errors -->

| layout | error |
|---|---:|
| a | 1 |
| c | 3 |
| gone | 9 |

<!-- end -->

| layout | of another table |
|---|---|
| b | yes |
"""


def test_rows_replace_their_own_and_keep_the_order(tmp_path: Path) -> None:
    document = tmp_path / "all.md"
    document.write_text(DOCUMENT)
    for _ in range(2):
        TABLE.put(document, [["c", "4"], ["b", "2"]])
        wanted = DOCUMENT.replace("| c | 3 |\n| gone | 9 |", "| b | 2 |\n| c | 4 |")
        assert document.read_text() == wanted


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_cell_that_fails_does_not_stop_the_others(jobs: int) -> None:
    said, told = io.StringIO(), []

    def run(cell: str) -> str:
        if cell == "b":
            raise JobFailed("a rank failed")
        return cell.upper()

    def tell(cell: str, outcome: str) -> list[str]:
        told.append((cell, outcome))
        return ["is not right"] if cell == "c" else []

    def good(cells: str) -> bool:
        with Progress("cells", stream=said) as bar:
            return run_cells(cells, run, tell, title=lambda cell: f"<{cell}>", bar=bar, jobs=jobs)

    assert good("ad") and not good("ac") and not good("ab")
    assert not good("abcd")
    assert told[-3:] == [("a", "A"), ("c", "C"), ("d", "D")]
    assert "<b>: a rank failed" in said.getvalue() and "<c>: is not right" in said.getvalue()


def test_the_document_has_the_tolerances_and_a_place_for_each_table() -> None:
    text = (ROOT / "docs/results/correctness.md").read_text()
    for tolerances in (layout.LOSS_TOLERANCE, updates.TOLERANCE):
        assert ", ".join(f"{value:g} ({kind})" for kind, value in tolerances.items()) in text
    for table in (runs.SUMS, runs.UPDATES):
        assert f"{table.begin}\n\n{table.lines([])[0]}\n{table.lines([])[1]}\n" in text


@pytest.mark.parametrize(
    ("table", "page"),
    [
        *((ray_layouts.table_of(device), "integrations.md") for device in ray_layouts.MADE_BY),
        (rl_layouts.TABLE, "integrations.md"),
    ],
    ids=[*ray_layouts.MADE_BY, "rl"],
)
def test_a_row_of_ray_and_of_rl_has_a_place(table: Table, page: str, tmp_path: Path) -> None:
    before = (ROOT / "docs/results" / page).read_text()
    document = tmp_path / page
    document.write_text(before)
    key = cast("tuple[str, ...]", table.keys[-1])
    row = [*key, *["new"] * (len(table.head) - len(key))]
    table.put(document, [row], "one")
    begin, _, rest = document.read_text().partition(table.begin)
    there, _, after = rest.partition("<!-- end -->")
    assert line(row) in there and "Run on one." in there
    assert before.startswith(begin) and before.endswith(after)


# What is made of the arguments of Megatron's functional tests (tests/layouts/functional).


GIVEN: dict[str, Value] = {
    "--num-layers": "12",
    "--hidden-size": "512",
    "--num-attention-heads": "4",
    "--seq-length": "1024",
    "--micro-batch-size": "4",
    "--global-batch-size": "32",
    "--train-iters": "50",
    "--tensor-model-parallel-size": "2",
    "--data-path": "${DATA_PATH}/some",
    "--transformer-impl": "transformer_engine",
    "--swiglu": True,
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Of a Megatron with some functional tests."""

    def test(name: str, *lines: str) -> None:
        file = tmp_path / "tests/functional_tests/test_cases" / name / "model_config.yaml"
        file.parent.mkdir(parents=True)
        given = [f"  {flag}: {str(value).lower()}" for flag, value in GIVEN.items()]
        file.write_text("\n".join(["MODEL_ARGS:", *given, *(f"  {one}" for one in lines)]))

    test("gpt/one")
    test("gpt/one_resumed", "--load: ${LOAD}", "--no-mmap-bin-files: true")
    test("gpt/inference_of_one")
    test("moe/lists", "--recompute-modules: '[mlp core_attn]'", "--seed: ${REPEAT}")
    test("t5/fp8", "--fp8-format: hybrid")
    test("multimodal/another")
    return tmp_path


def test_a_row_that_differs_from_its_test_is_told(checkout: Path) -> None:
    cases, _ = arguments.cases_of(checkout)
    assert arguments.strange(cases, cases) == []
    (one,) = (case for case in cases if case.name == "one")
    assert arguments.strange([one], [case for case in cases if case is not one]) == [
        "one: the checkout has no such test that a CPU can run"
    ]
    wider = tuple("3" if word == "64" else word for word in one.arguments)
    row = type(one)(name="one_resumed", ranks=4, arguments=wider)
    assert arguments.strange([row], cases) == [
        "one_resumed: the row has --hidden-size 3; the checkout has --hidden-size 64"
    ]


def test_rows_have_names_of_their_own() -> None:
    names = {case.name for case in CASES}
    assert len(names) == len(CASES) >= 40
    assert len(set(QUICK)) == 8 and names >= set(QUICK)


PAGE = """# Tests

<!-- run: {by}; not to be edited by hand -->
<!-- end -->

<!-- not run: {by}; not to be edited by hand -->
<!-- end -->
"""


def test_the_command(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    misses: list[str] = []

    def check(case: arguments.Case, folder: Path) -> Report:
        return Report(layout=case, buckets=3, same_bits=not misses, misses=list(misses))

    monkeypatch.setattr(arguments, "check", check)
    monkeypatch.setattr(functional_tests, "CASES", ())
    by = "made by `make functional MEGATRON=CHECKOUT MARKDOWN=docs/results/recipes.md`"
    document = checkout / "functional.md"
    document.write_text(PAGE.format(by=by))
    words = ["--megatron", str(checkout), "--markdown", str(document)]
    assert functional_tests.main(words) == 0
    text = document.read_text()
    assert "| one | 1 |  |" in text
    assert "| --fp8-format needs fp8 of Transformer Engine | 1 |" in text
    # A miss is told in its row, until the test meets again what is required.
    misses.append("other bits")
    assert functional_tests.main([*words, "--layout", "one"]) == 1
    assert "| one (MISS) | 1 |  |" in document.read_text()
    misses.clear()
    assert functional_tests.main([*words, "--layout", "one"]) == 0
    assert document.read_text() == text
    # A row that the checkout does not have is a failure.
    row = arguments.cases_of(checkout)[0][0]
    monkeypatch.setattr(functional_tests, "CASES", [type(row)(name="x", ranks=2, arguments=())])
    assert functional_tests.main(words[:2]) == 1
    assert "x: the checkout has no such test" in capsys.readouterr().err
    for wrong in (words[2:], ["--megatron", str(checkout / "tests")]):
        with pytest.raises(SystemExit) as stopped:
            functional_tests.main(wrong)
        assert stopped.value.code == 2
