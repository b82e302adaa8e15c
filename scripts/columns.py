"""Tables for a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(table: Sequence[Sequence[str]], left: int = 0) -> str:
    """Columns of equal width: numbers, to the right, and before them ``left`` columns of text."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )


def pipes(table: Sequence[Sequence[str]]) -> list[str]:
    """A table as Markdown."""
    lines = [f"| {' | '.join(line)} |" for line in table]
    return [lines[0], "|" + " --- |" * len(table[0]), *lines[1:]]
