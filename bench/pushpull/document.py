"""What a document's tables say of speed: what `make bench` wrote, and what stands beside NCCL."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from bench.kit.units import parse_size
from bench.pushpull.markdown import BEGIN, END
from bench.pushpull.plots import Parts

_OF_LIMIT = ("of-limit", "of M/B")
_RATIO = ("NCCL's time over BytePS's", "speed over NCCL's (min..max)")


def _tables(text: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Each table's heading, the nearest line above that begins with #, and its rows by column."""
    heading = ""
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
            yield heading, rows
            head, rows = [], []
        if line.startswith("#"):
            heading = line.lstrip("# ")


def _number(cell: str) -> float | None:
    found = re.match(r"\**(\d+(?:\.\d+)?)", cell)
    return float(found[1]) if found else None


def _of_results(heading: str, rows: Sequence[Mapping[str, str]]) -> Parts | None:
    """The largest size of an experiment that `make bench` wrote."""
    largest = max(rows, key=lambda row: parse_size(row["size"]))
    chosen = [r for r in rows if (r["size"], r["type"]) == (largest["size"], largest["type"])]
    ours = _number(chosen[0]["of-limit"])
    if ours is None:
        return None
    times = {row["backend"]: float(row["p50 ms"]) for row in chosen}
    first = chosen[0]["backend"]
    parts = {backend: ours * times[first] / time for backend, time in times.items()}
    return Parts(f"{heading}\n{largest['size']} {largest['type']}", parts)


def _beside_nccl(row: Mapping[str, str]) -> Parts | None:
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
    found = [
        _of_results(heading, rows) for heading, rows in _tables(written) if "backend" in rows[0]
    ]
    for _, rows in _tables(before + after):
        if any(name in rows[0] for name in _RATIO):
            found += [_beside_nccl(row) for row in rows]
    return [parts for parts in found if parts is not None]
