"""Jobs whose training state is kept in memory recover from there, with the checkpoint gone."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest

from bench.ray_failures.cases import SAVE_EVERY, STRIKE, Case, Outcome, Runner, problems
from megatron_byteps_ray import memory
from megatron_byteps_ray.job import Job
from megatron_byteps_ray.memory import Keeper, Port, Snapshots

EVERY = 2
# The last state before the strike may still be in flight to the actors by then.
NEWEST = STRIKE - 1


def _fault(rank: int, what: str, when: int | str = STRIKE, incarnation: int = 0) -> dict[str, Any]:
    return {"incarnation": incarnation, "rank": rank, "when": when, "what": what}


def _run(runner: Runner, name: str, case: Case, *, disk: bool = False, **changes: Any) -> Outcome:
    """The job; unless ``disk``, its checkpoints are removed when it fails."""

    def listen(event: dict[str, Any], job: Job) -> None:
        if event["event"] == "failure" and not disk:
            shutil.rmtree(job._folder / "saved", ignore_errors=True)

    return runner.run(name, case, listen, memory_save_interval=EVERY, **changes)


def _first_steps(outcome: Outcome) -> list[int]:
    """Of each incarnation that made one."""
    first: dict[int, int] = {}
    for step in outcome.steps:
        first.setdefault(step["incarnation"], step["step"])
    return list(first.values())


def _sources(outcome: Outcome) -> list[str]:
    return [event["source"] for event in outcome.of("state")]


CASES = {
    "an actor": (
        Case(title="", faults=[_fault(1, "actor")], arguments=["--use-distributed-optimizer"]),
        NEWEST,
        1,
    ),
    "midway": (Case(title="", faults=[_fault(1, "kill", f"memory:{NEWEST}")]), NEWEST - EVERY, 0),
    "tp2": (
        Case(
            title="",
            ranks=4,
            faults=[_fault(3, "actor")],
            arguments=["--tensor-model-parallel-size", "2"],
        ),
        NEWEST,
        1,
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] if n == "tp2" else []) for n in CASES]
)
def test_a_recovery_reads_no_checkpoint(runner: Runner, name: str) -> None:
    """``midway``: a state of which only a part was handed in is not used, but the one before."""
    case, step, moved = CASES[name]
    outcome = _run(runner, f"memory-{name.replace(' ', '-')}", case)
    assert problems(case, outcome, runner.uninterrupted(case)) == []
    (state,) = outcome.of("state")
    assert (state["source"], state["moved"]) == ("memory", moved)
    assert 0 < state["step"] <= step
    assert _first_steps(outcome) == [1, state["step"] + 1]
    assert outcome.state["failures"][0]["state"]["source"] == "memory"
    (recovered,) = outcome.of("recovered")
    assert "loaded" in recovered["phases"].seconds()


def test_a_job_without_checkpoints_recovers(runner: Runner) -> None:
    """Two failures one after the other, the second before any step after the first."""
    faults = [_fault(1, "actor"), _fault(0, "kill", "start", incarnation=1)]
    case = Case(title="", faults=faults, incarnations=3, saves=False)
    outcome = _run(runner, "memory-alone", case)
    assert problems(case, outcome, runner.uninterrupted(case)) == []
    assert _sources(outcome) == ["memory", "memory"]
    first, second = (state["step"] for state in outcome.of("state"))
    assert 0 < first == second <= NEWEST
    assert _first_steps(outcome) == [1, first + 1]


def test_what_memory_lacks_is_read_from_the_checkpoint(runner: Runner) -> None:
    case = Case(title="", faults=[_fault(0, "actor"), _fault(1, "actor")])
    outcome = _run(runner, "memory-lost", case, disk=True)
    assert problems(case, outcome, runner.uninterrupted(case)) == []
    (state,) = outcome.of("state")
    assert (state["source"], "lost" in state["why"]) == ("checkpoint", True)
    assert _first_steps(outcome) == [1, SAVE_EVERY + 1]


def test_ranks_that_fail_by_themselves_get_the_checkpoint_next(runner: Runner) -> None:
    faults = [_fault(0, "kill"), _fault(1, "raise", "start", incarnation=1)]
    case = Case(title="", faults=faults, incarnations=3)
    outcome = _run(runner, "memory-refused", case, disk=True)
    assert problems(case, outcome, runner.uninterrupted(case)) == []
    assert _sources(outcome) == ["memory", "checkpoint"]
    kept, refused = outcome.of("state")
    assert f"from step {kept['step']} of it failed" in refused["why"]
    assert _first_steps(outcome) == [1, SAVE_EVERY + 1]


def _kept(snapshots: Snapshots) -> set[tuple[int, int]]:
    return set(snapshots.whole("job"))


def test_only_whole_snapshots_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank sends arrives in chunks; one that ends midway leaves nothing that is used."""
    monkeypatch.setattr(memory, "CHUNK_BYTES", 1000)
    snapshots = Snapshots()
    snapshots.begin("job", 0, None)

    def keep(step: int, chunks: Any) -> None:
        for index, chunk in enumerate(chunks):
            snapshots.add("job", 0, 3, step, index, chunk)

    port = Port(keep, lambda step: snapshots.chunks("job", 3, step))
    data = bytes(range(256)) * 10
    with Keeper(port.name, 2) as target:
        for start in range(0, len(data), 300):
            target.write(memoryview(data)[start : start + 300])
        target.finish()
    with Keeper(port.name, 4) as target:
        target.write(data)
    assert snapshots.whole("job") == {(3, 2): len(data)}
    assert [len(chunk) for chunk in snapshots.chunks("job", 3, 2)] == [1000, 1000, 560]
    assert memory.fetch(port.name, 2) == data


def test_needless_snapshots_are_dropped() -> None:
    snapshots = Snapshots()

    def add(job: str, number: int | None, rank: int, step: int) -> None:
        for index, chunk in enumerate((b"x", b"")):
            snapshots.add(job, number, rank, step, index, chunk)

    add("other", None, 0, 4)
    snapshots.begin("job", 0, None)
    for step in (2, 4, 6):
        add("job", 0, 0, step)
        add("job", 0, 1, step)
    snapshots.drop_before(4)
    assert _kept(snapshots) == {(0, 4), (1, 4), (0, 6), (1, 6)}
    assert snapshots.whole("other") == {}
    # The next incarnation starts from step 4: step 6 is done again, and what comes late of it is
    # not taken for the new one's.
    snapshots.begin("job", 1, 4)
    add("job", 0, 1, 6)
    assert _kept(snapshots) == {(0, 4), (1, 4)}
    with pytest.raises(LookupError, match="rank 0, step 6"):
        snapshots.chunks("job", 0, 6)


def test_a_bad_interval_is_named() -> None:
    from megatron_byteps_ray.settings import Settings

    plain = Settings(entry="train.py")
    with pytest.raises(ValueError, match="memory_save_interval must be 1 or more, not 0"):
        dataclasses.replace(plain, memory_save_interval=0)
    with pytest.raises(ValueError, match="--use-torch-fsdp2"):
        Settings(entry="train.py", memory_save_interval=5, arguments=("--use-torch-fsdp2",))
