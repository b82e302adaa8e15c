"""docs/results/recipes.md: as `make recipes` writes it, and true of the other results."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.recipekit.features import FEATURES, rows_of_results
from scripts.recipekit.page import MARKS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "results/recipes.md").read_text(encoding="utf-8")


def _rows(mark: str) -> list[list[str]]:
    """Of the table under a mark, without its head."""
    text = re.search(rf"<!-- {mark}: .*?-->\n(.*?)\n<!-- end -->", PAGE, re.S)
    assert text, mark
    lines = [line.strip("| ").split(" | ") for line in text[1].splitlines()]
    assert len({len(line) for line in lines[:1] + lines[2:]}) == 1, mark
    return lines[2:]


def test_every_table_is_there() -> None:
    for mark in MARKS:
        assert _rows(mark), mark


def test_counts_are_of_one_number() -> None:
    for _, source, number, *counts in _rows("counts"):
        assert re.search(r"\d+\.\d+\.\d+", source)
        for count in counts:
            whole, _, part = count.partition(" ")
            assert int(whole) <= int(number)
            assert not part or part == f"({100 * int(whole) / int(number):.1f} %)"
        accepted, through, run = (int(counts[i].split()[0]) for i in (0, 2, 4))
        assert max(through, run) <= accepted


def test_what_was_run_is_in_the_tables_of_correctness() -> None:
    rows, features = rows_of_results(DOCS), {feature.name: feature for feature in FEATURES}
    for name, told, *_ in _rows("features"):
        if told != "accepted, never run":
            assert told in rows, f"{name}: no table has {told} any more: `make recipes`"
            assert told in features[name].rows, name
