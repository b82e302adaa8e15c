"""The tables of functional tests, for a document and for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.columns import aligned

from ..gpt.outcome import Report
from ..table import Table
from .runs import Case

_MADE_BY = "made by `make functional MEGATRON=CHECKOUT MARKDOWN=docs/results/functional.md`"
_MARK = f"<!-- {{}}: {_MADE_BY}; not to be edited by hand -->"
_MISS = " (MISS)"
"""After the name of a test whose two runs differ."""


def put(document: Path, report: Report, case: Case, cases: Sequence[Case]) -> None:
    """Write a test's row into the document.

    Raises:
        SystemExit: the document has no place for it.
    """
    missed = report.misses or not report.same_bits
    table = Table(
        begin=_MARK.format("run"),
        head=("test", "also", "left out"),
        align="lrl",
        keys=[case.name for case in cases],
        key_of=lambda cells: cells[0].removesuffix(_MISS),
    )
    row = [
        case.name + _MISS * bool(missed),
        str(len(case.others) or ""),
        " ".join(case.left_out),
    ]
    table.put(document, [row])


def put_others(document: Path, cannot: Mapping[str, str]) -> None:
    """Write how many tests a CPU cannot run, and why."""
    tests = Counter(cannot.values())
    reasons = sorted(tests, key=lambda why: (-tests[why], why))
    table = Table(begin=_MARK.format("not run"), head=("why", "tests"), align="lr", keys=reasons)
    table.put(document, [[why, str(tests[why])] for why in reasons])


def listing(cases: Sequence[Case], cannot: Mapping[str, str]) -> str:
    """What there is to run, and what cannot be."""
    rows = [[case.name, str(case.ranks), " ".join(case.arguments)] for case in cases]
    rows += [[name, "-", why] for name, why in cannot.items()]
    return aligned([["test", "ranks", "arguments"], *rows], left=3)
