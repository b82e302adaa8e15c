"""Rows of some layouts in the document of all."""

from __future__ import annotations

import pytest

from layouts.merging import MergeError, merged

ORDER = ("a", "b", "c")
WHOLE = """# All

| layout | error |
| --- | --- |
| a | 1 |
| c | 3 |
| gone | 9 |

Between.

| layout | ok |
| --- | --- |
| a | yes |
"""


def test_rows_replace_others_and_keep_the_order() -> None:
    newer = "# Some\n\n| layout | error |\n| --- | --- |\n| c | 4 |\n| b | 2 |\n"
    text = merged(WHOLE, newer, ORDER)
    assert text == WHOLE.replace("| c | 3 |\n| gone | 9 |", "| b | 2 |\n| c | 4 |")
    assert merged(text, newer, ORDER) == text


def test_a_table_without_rows_changes_nothing() -> None:
    assert merged(WHOLE, "| layout | other |\n| --- | --- |\n\n", ("a", "b", "c", "gone")) == WHOLE


def test_another_table_is_refused() -> None:
    with pytest.raises(MergeError, match=r"no table of \| layout \| new \|: run all"):
        merged(WHOLE, "| layout | new |\n| --- | --- |\n| b | 2 |\n", ORDER)
