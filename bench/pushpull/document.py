"""What a document's tables say of speed: what `make bench` wrote, and comparisons with NCCL."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from bench.kit.units import parse_size
from bench.pushpull.markdown import BEGIN, END
from bench.pushpull.plots import Parts

_OF_LIMIT = ("of-limit", "of M/B")
_RATIO = ("NCCL's time over BytePS's", "speed over NCCL's (min..max)")


def _tables(text: str) -> Iterator[list[dict[str, str]]]:
    """Each table's rows by column."""
    head: list[str] = []
    rows: list[dict[str, str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            if not head:
                head = cells
            elif set(cells[0]) != {"-"} or len(cells[0]) < 3:
                # Of two columns of one name the first is ours.
                rows.append(dict(reversed([*zip(head, cells, strict=False)])))
            continue
        if head:
            yield rows
            head, rows = [], []


def _number(cell: str) -> float | None:
    found = re.match(r"\**(\d+(?:\.\d+)?)", cell)
    return float(found[1]) if found else None


def _of_results(rows: Sequence[Mapping[str, str]]) -> Iterator[Parts]:
    """The largest size of each experiment that `make bench` wrote."""
    for name in dict.fromkeys(row["experiment"] for row in rows):
        mine = [row for row in rows if row["experiment"] == name]
        size = max((row["size"] for row in mine), key=lambda size: parse_size(size.split()[0]))
        chosen = [row for row in mine if row["size"] == size]
        ours = _number(chosen[0]["of-limit"])
        if ours is None:
            continue
        parts = {"byteps": ours}
        for row in chosen:
            if row["backend"] != "-":
                parts[row["backend"]] = ours * float(row["ms"]) / float(row["its ms"])
        yield Parts(f"{name}\n{size}", parts)


def _with_nccl(row: Mapping[str, str]) -> Parts | None:
    """A row of tensors on GPUs."""
    ours = next((_number(row[name]) for name in _OF_LIMIT if name in row), None)
    ratio = next((_number(row[name]) for name in _RATIO if name in row), None)
    if ours is None or ratio is None:
        return None
    label = f"{row['workers + servers']}, {row['links']}, GPU\n{row['size']}"
    return Parts(label, {"byteps": ours, "nccl": ours / ratio})


def parts_in(text: str) -> list[Parts]:
    """Of each experiment on links with a limit, how near each backend comes to that limit.

    Args:
        text: of a document such as docs/results/figures.md.

    Raises:
        ValueError: it has no results.
    """
    before, begin, rest = text.partition(BEGIN)
    written, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there are no results, which begin with {BEGIN!r} and end with {END!r}")
    found: list[Parts | None] = []
    for rows in _tables(written):
        found += _of_results(rows)
    for rows in _tables(before + after):
        if any(name in rows[0] for name in _RATIO):
            found += [_with_nccl(row) for row in rows]
    return [parts for parts in found if parts is not None]
