"""Puts the rows of some layouts into a document that has all of them."""

from __future__ import annotations

from collections.abc import Sequence


class MergeError(ValueError):
    """The document has other tables."""


def merged(document: str, newer: str, order: Sequence[str]) -> str:
    """`document` with the rows of `newer`, which replace those of the same layouts.

    Args:
        document: its text stays, but for the rows.
        newer: a document of some layouts.
        order: names of layouts, as rows follow each other. Rows of no layout of these go.

    Raises:
        MergeError: `newer` has a table that `document` has not: run all layouts.
    """
    lines = document.splitlines()
    for header, rows in _tables(newer.splitlines()).items():
        if header not in lines:
            raise MergeError(f"the document has no table of {header}: run all layouts")
        first = lines.index(header) + 2
        end = first
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        by_name = {_name(row): row for row in [*lines[first:end], *rows]}
        lines[first:end] = [by_name[name] for name in order if name in by_name]
    return "\n".join([*lines, ""])


def _tables(lines: Sequence[str]) -> dict[str, list[str]]:
    """The rows of each table that has some, by its header."""
    found: dict[str, list[str]] = {}
    header = ""
    for before, line in zip(["", *lines], lines, strict=False):
        if not line.startswith("|"):
            header = ""
        elif line.startswith("| ---"):
            header = before
        elif header:
            found.setdefault(header, []).append(line)
    return found


def _name(row: str) -> str:
    return row.split("|")[1].strip()
