"""Tables of layouts in documents. Each line is a row that was run, now or before."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

END = "<!-- end -->"
_RULES = {"l": "---", "r": "---:"}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Where a table stands in a document, and which rows it can have."""

    begin: str
    """The mark before it; after it stands END."""
    head: Sequence[str]
    align: str = ""
    """``l`` or ``r`` for each column; to the left without."""
    keys: Sequence[Hashable]
    """Of all rows, in their order."""
    key_of: Callable[[Sequence[str]], Hashable] = itemgetter(0)
    """Which row some cells are of."""

    def lines(self, rows: Sequence[Sequence[str]]) -> list[str]:
        """The table, as Markdown, with these rows."""
        rule = [_RULES[one] for one in self.align or "l" * len(self.head)]
        return [line(self.head), f"|{'|'.join(rule)}|", *map(line, rows)]

    def put(self, document: Path, rows: Sequence[Sequence[str]], machine: str = "") -> None:
        """Write these rows into a document, and keep the others that it has.

        Args:
            machine: what ran them, to be told above the table; without it nothing is told.

        Raises:
            SystemExit: the document has no place for the table.
        """
        before, begin, rest = document.read_text(encoding="utf-8").partition(self.begin)
        there, end, after = rest.partition(END)
        if not (begin and end):
            raise SystemExit(f"error: {document} has no place for the table ({self.begin})")
        old = [cells_of(one) for one in there.splitlines() if one.startswith("| ")]
        known = {self.key_of(cells): cells for cells in [*old, *rows]}
        kept = [known[key] for key in self.keys if key in known]
        told = [f"Run on {machine}.", ""] if machine else []
        text = "\n".join(["", *told, *self.lines(kept), ""])
        document.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def line(cells: Sequence[str]) -> str:
    """A row as Markdown."""
    return f"| {' | '.join(cells)} |"


def cells_of(text: str) -> list[str]:
    """The cells of such a row."""
    return [cell.strip() for cell in text.split("|")[1:-1]]
