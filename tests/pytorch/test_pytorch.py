"""PyTorch's own tests of torch.distributed: tests that pass over gloo pass through servers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pytorch.run import KNOWN, MODES, SHAPES, Compared, Verdict, compare, report

LEAST_THAT_SEND = 50
"""Least number of tests of each mode through servers, so that none passes only over gloo."""


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES)
def test_what_passes_over_gloo_passes_through_servers(mode: str) -> None:
    verdict = compare(MODES[mode])
    print(report(verdict))
    assert not verdict.faults and not verdict.stale
    assert sum(outcome.operations > 0 for outcome in verdict.compared) >= LEAST_THAT_SEND


@pytest.mark.thorough
def test_a_test_that_hangs_or_ends_its_rank_costs_itself_alone() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.pytorch.odd_cases"],
        stdout=subprocess.PIPE,
        timeout=500,
        check=True,
    )
    late, failed, passed = map(json.loads, ended.stdout.splitlines())
    assert late["outcome"] == "late" and late["codes"] == [None, None]
    child = re.search(r"child (\d+)", late["error"])
    assert child is not None, late
    state = Path(f"/proc/{child[1]}/stat")
    assert not state.exists() or " Z " in state.read_text(), "a child of a rank outlived it"
    assert failed["outcome"] == "failed" and -9 in failed["codes"]
    assert "the last word" in failed["error"]
    assert passed["outcome"] == "passed"


def _compared(test: str, reference: str, byteps: str, *, without_shapes: bool = True) -> Compared:
    return Compared(
        test=test,
        reference=reference,
        byteps=byteps,
        operations=1,
        error="",
        without_shapes=without_shapes,
    )


def test_a_difference_is_a_fault_and_a_reason_without_one_is_stale() -> None:
    outcomes = [
        _compared("test_both", "passed", "passed"),
        _compared("test_neither", "failed", "late"),
        _compared("test_fault", "passed", "late"),
    ]
    verdict = Verdict(mode=MODES["flat"], compared=outcomes)
    assert [outcome.test for outcome in verdict.faults] == ["test_fault"]
    assert verdict.stale == []
    assert verdict.cells()[2:] == ["3", "2", "1", "1"]
    assert "passes over gloo alone: test_fault" in report(verdict)
    same = _compared("test_both", "passed", "passed", without_shapes=False)
    assert SHAPES in KNOWN
    assert Verdict(mode=MODES["flat"], compared=[same]).stale == [SHAPES]
