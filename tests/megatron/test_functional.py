"""The arguments of Megatron's functional tests, through BytePS and through all-reduce.

`make functional MEGATRON=checkout` runs all that a CPU can; here are those of
tests/layouts/functional/rows.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts.functional.rows import CASES, QUICK
from tests.layouts.functional.runs import Case, check


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.thorough)
        for case in CASES
    ],
)
def test_the_same_bits(fork_server: None, run_dir: Path, case: Case) -> None:
    report = check(case, run_dir / case.name)
    assert report.misses == []
    assert report.same_bits and report.buckets > 0
