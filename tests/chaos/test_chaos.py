"""A few seeds of `make chaos`: real jobs on emulated hosts, which something breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.chaos import find_programs, play
from tests.chaos.seeds import KINDS, Script, make_script

BOUNDED = (1, 2, 3, 4, 5, 1023)
"""The last is kept and encrypted, and a worker is killed."""
MOST_JOBS_S = 240


@pytest.fixture(scope="module")
def programs() -> Path:
    return find_programs("")


@pytest.mark.requires("root")
@pytest.mark.timeout(MOST_JOBS_S)
def test_jobs_end_well_or_by_name(programs: Path, run_dir: Path) -> None:
    results = play([make_script(seed) for seed in BOUNDED], programs, run_dir)
    wrong = {result.script.seed: result.wrong for result in results if result.wrong}
    assert not wrong
    # The seeds are chosen so that something happens.
    assert any(not result.survived for result in results)
    assert results[-1].lives > 1 and results[-1].ended["worker 0"] == 0


@pytest.mark.requires("root")
def test_a_job_in_which_nothing_breaks_goes_on(programs: Path, run_dir: Path) -> None:
    script = Script(seed=0, workers=3, servers=2, rounds=10, tensors=3, size=400_000, faults=())
    (result,) = play([script], programs, run_dir)
    assert result.ended == dict.fromkeys(script.nodes, 0)
    assert not result.wrong


def test_a_seed_is_one_script() -> None:
    assert make_script(7) == make_script(7)
    kinds = {fault.kind for seed in range(300) for fault in make_script(seed).faults}
    assert kinds == set(KINDS)
    assert not any(make_script(seed).keep or make_script(seed).tls for seed in (1, 577, 1000))
    drawn = [make_script(seed) for seed in range(1001, 1101)]
    assert {(script.keep, script.tls) for script in drawn} == {
        (keep, tls) for keep in (False, True) for tls in (False, True)
    }
