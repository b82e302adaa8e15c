"""The tables of functional tests, for a document and for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.columns import aligned

from ..gpt.outcome import Report
from ..table import Table
from .runs import Case

_MADE_BY = "made by `make functional MEGATRON=CHECKOUT MARKDOWN=docs/results/functional.md`"
_MARK = f"<!-- {{}}: {_MADE_BY}; not to be edited by hand -->"


def put(document: Path, report: Report, case: Case, cases: Sequence[Case]) -> None:
    """Write a test's row into the document.

    Raises:
        SystemExit: the document has no place for it.
    """
    table = Table(
        begin=_MARK.format("run"),
        head=("test", "also", "ranks", "sums a step", "left out", "same bits", "ok"),
        align="lrrrlll",
        keys=[case.name for case in cases],
    )
    row = [
        case.name,
        str(len(case.others)),
        str(case.ranks),
        str(report.buckets),
        " ".join(case.left_out) or "-",
        "all" if report.same_bits else "no",
        "MISS" if report.misses else "yes",
    ]
    table.put(document, [row])


def put_others(document: Path, cannot: Mapping[str, str]) -> None:
    """Write which tests a CPU cannot run."""
    table = Table(begin=_MARK.format("not run"), head=("test", "why"), keys=list(cannot))
    table.put(document, [[name, why] for name, why in cannot.items()])


def listing(cases: Sequence[Case], cannot: Mapping[str, str]) -> str:
    """What there is to run, and what cannot be."""
    rows = [[case.name, str(case.ranks), " ".join(case.arguments)] for case in cases]
    rows += [[name, "-", why] for name, why in cannot.items()]
    return aligned([["test", "ranks", "arguments"], *rows], left=3)
