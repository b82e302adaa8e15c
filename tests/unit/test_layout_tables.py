"""Tests of tables of layouts: tolerances, their places in documents, and the ranks' fork server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts import ray_layouts, rl_layouts
from tests.layouts.functional.rows import CASES, QUICK
from tests.layouts.gpt import layout, runs, updates
from tests.layouts.table import Table

RESULTS = Path(__file__).resolve().parents[2] / "docs/results"


def test_the_document_has_the_tolerances() -> None:
    text = " ".join((RESULTS / "correctness.md").read_text().split())
    for tolerances in (layout.LOSS_TOLERANCE, updates.TOLERANCE):
        assert ", ".join(f"{value:g} ({kind})" for kind, value in tolerances.items()) in text


@pytest.mark.parametrize(
    ("table", "page"),
    [
        (runs.SUMS, "correctness.md"),
        (runs.UPDATES, "correctness.md"),
        *((ray_layouts.table_of(device), "integrations.md") for device in ray_layouts.MADE_BY),
        (rl_layouts.TABLE, "integrations.md"),
    ],
)
def test_each_table_has_a_place_in_its_document(table: Table, page: str) -> None:
    head = "\n".join(table.lines([]))
    assert f"{table.begin}\n" in (RESULTS / page).read_text()
    assert head in (RESULTS / page).read_text()


def test_rows_have_names_of_their_own() -> None:
    names = {case.name for case in CASES}
    assert len(names) == len(CASES) >= 40
    assert len(set(QUICK)) == 8 and names >= set(QUICK)
