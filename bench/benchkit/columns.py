"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(table: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, numbers to the right."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )
