"""A few seeds of `make chaos`: real jobs on emulated hosts, which something breaks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from tests.chaos.broken_job import Result
from tests.chaos.chaos import find_programs, play
from tests.chaos.seeds import KINDS, Script, make_script

BOUNDED = (1, 2, 3, 4, 5, 1023)
"""The last is kept and encrypted, and a worker is killed."""
LASTING = (2014, 2031, 2071)
"""Jobs that lose servers; the first and the last one are of replicas, one of which is killed."""
RETURNING = (3001, 3002, 3006)
"""Jobs whose scheduler dies, most of them twice."""
COPYING = (4007,)
"""A job that loses servers which keep an optimizer's state."""
MOST_JOBS_S = 240


@pytest.fixture(scope="module")
def programs() -> Path:
    return find_programs("")


def _play_rightly(seeds: Sequence[int], programs: Path, run_dir: Path) -> list[Result]:
    """The jobs of these seeds, of which none goes wrong."""
    results = play([make_script(seed) for seed in seeds], programs, run_dir)
    wrong = {result.script.seed: result.wrong for result in results if result.wrong}
    assert not wrong
    return results


@pytest.mark.requires("root")
@pytest.mark.timeout(MOST_JOBS_S)
def test_jobs_end_well_or_by_name(programs: Path, run_dir: Path) -> None:
    results = _play_rightly(BOUNDED, programs, run_dir)
    # The seeds are chosen so that something happens.
    assert any(not result.survived for result in results)
    assert results[-1].lives > 1 and results[-1].ended["worker 0"] == 0


@pytest.mark.requires("root")
@pytest.mark.timeout(MOST_JOBS_S)
def test_jobs_go_on_without_servers_and_replicas(programs: Path, run_dir: Path) -> None:
    results = _play_rightly(LASTING, programs, run_dir)
    assert [result.script.replicas for result in results] == [True, False, True]
    assert all(result.replaced > 0 for result in results)


@pytest.mark.requires("root")
@pytest.mark.timeout(MOST_JOBS_S)
def test_jobs_go_on_with_another_scheduler(programs: Path, run_dir: Path) -> None:
    results = _play_rightly(RETURNING, programs, run_dir)
    assert all(
        status == 0
        for result in results
        for node, status in result.ended.items()
        if node != "scheduler"
    )
    again = [log.read_text() for log in run_dir.glob("seed-*/scheduler-again-*.log")]
    assert any("goes on with the job of another one that died" in text for text in again)


@pytest.mark.requires("root")
@pytest.mark.timeout(MOST_JOBS_S)
def test_jobs_go_on_from_copies(programs: Path, run_dir: Path) -> None:
    results = _play_rightly(COPYING, programs, run_dir)
    assert all(result.survived and result.replaced > 0 for result in results)


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


def test_what_is_broken_in_jobs_that_last() -> None:
    drawn = [make_script(seed) for seed in range(2001, 2301)]
    assert {(script.replicas, script.tls) for script in drawn} == set(
        product((False, True), repeat=2)
    )
    assert all(script.spares > 0 and not script.keep for script in drawn)
    lost = {(f.kind, f.node.split()[0]) for script in drawn for f in script.faults if f.loses}
    kinds = ("kill", "stop", "cut", "term")
    assert lost >= {(kind, node) for kind in kinds for node in ("server", "spare")}
    assert {kind for kind, node in lost if node == "worker"} == {"kill", "stop", "cut"}
    for script in drawn:
        nodes = {fault.node for fault in script.faults if fault.loses}
        assert "scheduler" not in nodes and script.nodes[-1] not in nodes
        assert script.replicas or not any(node.startswith("worker") for node in nodes)


def test_what_is_broken_in_jobs_whose_scheduler_returns() -> None:
    drawn = [make_script(seed) for seed in range(3001, 3101)]
    assert all(script.returns and not script.spares and not script.keep for script in drawn)
    lost = [[f for f in script.faults if f.loses] for script in drawn]
    assert {len(faults) for faults in lost} == {1, 2}
    assert {(f.kind, f.node) for faults in lost for f in faults} == {("kill", "scheduler")}


def test_what_is_broken_in_jobs_with_copies() -> None:
    drawn = [make_script(seed) for seed in range(4001, 4101)]
    assert all(script.copies and script.spares == 1 and script.servers > 1 for script in drawn)
    lost = {(f.kind, f.node.split()[0]) for script in drawn for f in script.faults if f.loses}
    assert lost == set(product(("kill", "stop", "cut", "term"), ("server", "spare")))
