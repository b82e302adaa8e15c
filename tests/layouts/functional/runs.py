"""Trains the arguments of a functional test through both backends and compares every bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..gpt.compare import compare
from ..gpt.outcome import Report
from ..gpt.rows import Layout
from ..gpt.runs import train


@dataclass(frozen=True, kw_only=True)
class Case(Layout):
    """A functional test, made small; or several with the same arguments."""

    arguments: tuple[str, ...]
    """Of Megatron: all of them, in the order of the flags."""
    left_out: tuple[str, ...] = ()
    """Flags of the test that a CPU cannot serve."""
    others: tuple[str, ...] = ()
    """Tests whose arguments come to the same."""

    def megatron_arguments(self) -> list[str]:
        return list(self.arguments)


def check(case: Case, folder: Path) -> Report:
    """Train it both ways, in a new folder, and compare.

    Raises:
        JobFailed: a run failed.
    """
    folder.mkdir(parents=True)
    ours = train(case, folder / "byteps", (), through_byteps=True)
    theirs = train(case, folder / "all-reduce", (), through_byteps=False)
    report = compare(case, ours.results(), theirs.results())
    if not report.misses and not report.same_bits:
        report.misses.append("not the same bits")
    return report
