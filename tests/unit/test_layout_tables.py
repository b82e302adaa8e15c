"""The tables of layouts (tests/layouts): rows in a document, and the cells that are run."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import cast

import pytest

from scripts.progress import Progress
from tests.layouts import ray_layouts, rl_layouts
from tests.layouts.command import run_cells
from tests.layouts.gpt import outcome, report, updates
from tests.layouts.job import JobFailed
from tests.layouts.table import Table, line

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


def test_the_machine_is_told_once(tmp_path: Path) -> None:
    document = tmp_path / "all.md"
    document.write_text(DOCUMENT)
    for machine in ("one", "another"):
        TABLE.put(document, [], machine)
    assert document.read_text().count("Run on") == 1
    assert "Run on another." in document.read_text()


def test_a_document_without_a_place_is_left_alone(tmp_path: Path) -> None:
    document = tmp_path / "all.md"
    document.write_text("# Nothing\n")
    with pytest.raises(SystemExit, match="no place for the table"):
        TABLE.put(document, [["a", "1"]])
    assert document.read_text() == "# Nothing\n"


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


def test_nothing_is_begun_after_the_budget() -> None:
    said, ran = io.StringIO(), []

    def run(cell: str) -> str:
        ran.append(cell)
        time.sleep(0.2)
        return cell

    with Progress("cells", stream=said) as bar:
        title = "{}!".format
        assert not run_cells("abc", run, lambda *_: [], title=title, bar=bar, budget=0.1)
    assert ran == ["a"]
    assert "not run, since --budget is used up: b!; c!" in said.getvalue()


def test_the_document_has_the_tolerances_and_a_place_for_each_table() -> None:
    text = (ROOT / "docs/results/correctness.md").read_text()
    for tolerances in (outcome.LOSS_TOLERANCE, updates.TOLERANCE):
        assert ", ".join(f"{value:g} ({kind})" for kind, value in tolerances.items()) in text
    for table in (report.SUMS, report.UPDATES):
        assert f"{table.begin}\n\n{table.lines([])[0]}\n{table.lines([])[1]}\n" in text


@pytest.mark.parametrize(
    ("table", "page"),
    [
        *((ray_layouts.table_of(device), "ray.md") for device in ray_layouts.MADE_BY),
        (rl_layouts.TABLE, "rl.md"),
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
