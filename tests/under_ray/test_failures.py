"""Jobs that lose processes continue with exactly the losses of an undisturbed job.

They restart from files, from memory, and by a driver that is started again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from bench.ray_failures.cases import (
    CASES,
    ENVIRONMENT,
    MODEL,
    SAVE_EVERY,
    STEPS,
    STRIKE,
    Case,
    Outcome,
    Runner,
    problems,
    several_nodes,
)
from megatron_byteps_ray import generation, memory
from megatron_byteps_ray.cluster import JobError, Pool
from megatron_byteps_ray.job import Job, record_of_steps
from megatron_byteps_ray.memory import jump_of
from tests.layouts.under_ray.modes import ROOT

NAMES = [
    pytest.param(name, marks=[pytest.mark.thorough] if case.thorough else [])
    for name, case in CASES.items()
    if not case.loses_node
]


@pytest.mark.parametrize("name", NAMES)
def test_a_failure_is_survived(runner: Runner, name: str) -> None:
    case = CASES[name]
    outcome = runner.run(name, case)
    assert problems(case, outcome, runner.uninterrupted(case)) == []
    assert outcome.state["state"] == "done"
    assert outcome.state["restarts"] == len(outcome.of("failure"))
    for recovered in outcome.of("recovered"):
        parts = recovered["phases"].seconds()
        assert {"noticed", "ended", "servers", "started", "groups", "step"} <= set(parts)
    if case.blames.endswith("hung") and name != "frozen":  # A stopped process writes no file.
        for log in (outcome.folder / "logs").glob("rank?.log"):
            assert "Current thread" in log.read_text()


def test_a_lost_machine_is_survived(runner: Runner, run_dir: Path) -> None:
    """The moved rank's state comes from the memory of the other machine."""
    case = CASES["node"]
    places: list[list[str]] = []

    def note(event: dict[str, Any], job: Job) -> None:
        if event["event"] == "generation":
            places.append([slot.facts["node"] for slot in job.pool.assigned])
        elif event["event"] == "failure":
            shutil.rmtree(job._folder / "saved", ignore_errors=True)

    with several_nodes(run_dir) as there:
        outcome = there.run("node", case, note, memory_save_interval=EVERY)
    assert problems(case, outcome, runner.uninterrupted(case)) == []
    # The machine may be lost before the newest state is written.
    first, again = _first_steps(outcome)
    assert first == 1 and again in (EVERY + 1, NEWEST + 1)
    before, after = places
    # One rank has moved to another machine, and the other rank has stayed.
    assert len(set(before)) == len(set(after)) == 2
    assert sum(old == new for old, new in zip(before, after, strict=True)) == 1


def test_a_lost_actor_is_replaced_by_a_spare_at_the_same_rank(runner: Runner) -> None:
    places: list[list[Any]] = []

    def note(event: dict[str, Any], job: Job) -> None:
        if event["event"] == "generation":
            places.append([slot.actor for slot in job.pool.assigned])

    runner.run("same-rank", CASES["actor"], note)
    before, after = places
    assert before[0] == after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize(("name", "stay"), [("rank-0", True), ("server", False)])
def test_servers_outlive_ranks_that_fail(runner: Runner, name: str, stay: bool) -> None:
    """Servers are replaced only if they may have caused the failure."""
    starts: list[list[int]] = []

    def note(event: dict[str, Any], job: Job) -> None:
        if event["event"] == "step":
            starts.append(ray.get([actor.starts.remote() for actor in job.pool.byteps]))

    runner.run(f"servers-{name}", CASES[name], note)
    before, after = starts[0], starts[-1]
    assert after == [count + (not stay) for count in before]


def test_fewer_ranks_where_no_spare_is_left(runner: Runner) -> None:
    """Fewer ranks resume from the checkpoint: the state in memory is sharded for more ranks."""

    def lose_spares(event: dict[str, Any], job: Job) -> None:
        if event["event"] == "failure":
            for slot in job.pool.spares():
                job.pool.lose(slot)

    case = Case(title="", faults=CASES["actor"].faults)
    outcome = runner.run("fewer", case, lose_spares, min_ranks=1, memory_save_interval=1)
    assert [event["ranks"] for event in outcome.of("generation")] == [2, 1]
    assert outcome.of("fewer")[0]["wanted"] == 2
    assert max(outcome.losses) == STEPS
    second = [step["step"] for step in outcome.steps if step["generation"] == 1]
    assert second[0] == SAVE_EVERY + 1


def test_a_job_leaves_a_machine_that_is_drained(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray drains a machine, and the job saves a checkpoint after the current step. So it repeats no
    step."""
    away = {""}

    def note(event: dict[str, Any], job: Job) -> None:
        if event["event"] == "step" and event["generation"] == 0:
            away.add(job.pool.assigned[0].facts["node"])
        elif event["event"] == "failure":
            away.clear()

    monkeypatch.setattr(generation, "draining_nodes", lambda: away)
    case = Case(
        title="",
        faults=[_fault(0, "told")],
        arguments=["--exit-signal-handler"],
        blames="rank 0 was told to end, and has left",
    )
    outcome = runner.run("drained", case, note)
    assert problems(case, outcome, runner.uninterrupted(case)) == []
    left = [step["step"] for step in outcome.steps if step["generation"] == 0]
    assert max(left) <= STRIKE
    assert _first_steps(outcome) == [1, max(left) + 1]


def test_a_job_that_never_makes_a_step_is_given_up(runner: Runner) -> None:
    faults = [{"generation": n, "rank": 1, "when": "start", "what": "raise"} for n in range(5)]
    with pytest.raises(JobError, match="2 times in a row without a step") as caught:
        runner.run("fruitless", Case(title="", faults=faults), max_fruitless=2)
    assert "RuntimeError: a fault that the script asked for" in str(caught.value)


def test_restarts_are_limited(runner: Runner) -> None:
    faults = [{"generation": n, "rank": 0, "when": STRIKE, "what": "kill"} for n in range(5)]
    with pytest.raises(JobError, match=r"failed 1 times \(max_restarts\)"):
        runner.run("limited", Case(title="", faults=faults), max_restarts=0)


# Jobs with training state in memory recover from there, with the checkpoint gone.


EVERY = 2
NEWEST = STRIKE - 1


def _fault(rank: int, what: str, when: int | str = STRIKE, generation: int = 0) -> dict[str, Any]:
    return {"generation": generation, "rank": rank, "when": when, "what": what}


def _run(runner: Runner, name: str, case: Case, *, disk: bool = False, **changes: Any) -> Outcome:
    """Run a job; unless ``disk``, its checkpoints are removed when it fails."""

    def listen(event: dict[str, Any], job: Job) -> None:
        if event["event"] == "failure" and not disk:
            shutil.rmtree(job._folder / "saved", ignore_errors=True)

    return runner.run(name, case, listen, memory_save_interval=EVERY, **changes)


def _first_steps(outcome: Outcome) -> list[int]:
    """Get the first step of each generation that made a step."""
    first: dict[int, int] = {}
    for step in outcome.steps:
        first.setdefault(step["generation"], step["step"])
    return list(first.values())


FROM_MEMORY = {
    "an actor": (
        Case(title="", faults=[_fault(1, "actor")], arguments=["--use-distributed-optimizer"]),
        NEWEST,
    ),
    # Memory gets no state of the step between. The checkpoint has one.
    "midway": (
        Case(title="", faults=[_fault(rank, "kill", f"memory:{NEWEST}") for rank in (0, 1)]),
        NEWEST - 2 * EVERY,
    ),
    "all actors": (Case(title="", faults=[_fault(0, "actor"), _fault(1, "actor")]), NEWEST),
    "tp2": (
        Case(
            title="",
            ranks=4,
            faults=[_fault(3, "actor")],
            arguments=["--tensor-model-parallel-size", "2"],
        ),
        NEWEST,
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.thorough] if n == "tp2" else []) for n in FROM_MEMORY],
)
def test_a_recovery_reads_no_checkpoint(runner: Runner, name: str) -> None:
    """``midway``: a state that is stored only partly is not used. The state before it is used."""
    case, step = FROM_MEMORY[name]
    outcome = _run(runner, f"memory-{name.replace(' ', '-')}", case)
    assert problems(case, outcome, runner.uninterrupted(case)) == []
    assert _first_steps(outcome) == [1, step + 1]
    (recovered,) = outcome.of("recovered")
    assert "loaded" in recovered["phases"].seconds()


def test_a_second_failure_before_a_step_is_survived(runner: Runner) -> None:
    faults = [_fault(1, "actor"), _fault(0, "kill", "start", generation=1)]
    case = Case(title="", faults=faults, generations=3, saves=False)
    outcome = _run(runner, "memory-alone", case)
    assert problems(case, outcome, runner.uninterrupted(case)) == []
    assert _first_steps(outcome) == [1, NEWEST + 1]


def test_ranks_that_fail_by_themselves_get_the_checkpoint_next(runner: Runner) -> None:
    faults = [_fault(0, "kill"), _fault(1, "raise", "start", generation=1)]
    case = Case(title="", faults=faults, generations=3)
    outcome = _run(runner, "memory-refused", case, disk=True)
    assert problems(case, outcome, runner.uninterrupted(case)) == []
    assert _first_steps(outcome) == [1, SAVE_EVERY + 1]


@pytest.mark.parametrize(
    ("nodes", "jump"),
    [("a", 0), ("aaa", 0), ("ab", 1), ("aa", 1), ("aabb", 2), ("abab", 1), ("aaaabbbb", 4)],
)
def test_copies_are_on_other_machines(nodes: str, jump: int) -> None:
    assert jump_of(list(nodes)) == jump


def test_needless_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path)
    state = memory.Memory(2)
    (first,) = state.arguments(["node"])
    memory.prepare(first, 0)
    old = memory.folder_of(first)
    assert old is not None and old.is_dir() and old.parents[1].stat().st_mode & 0o077 == 0
    partly = old / "0" / "iter_0000002_0_local.dirty.pt"
    partly.parent.mkdir()
    for file in (partly, whole := partly.with_name("iter_0000002_0_local.pt")):
        file.touch()
    memory.prepare(state.arguments(["node"])[0], 0)
    assert whole.exists() and not partly.exists()
    state.start_anew()
    (second,) = state.arguments(["node"])
    memory.prepare(second, 0)
    new = memory.folder_of(second)
    assert new is not None and new.is_dir() and not old.exists()
    memory.clear(new)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_interval_is_named() -> None:
    from megatron_byteps_ray.settings import Settings

    plain = Settings(entry="train.py")
    with pytest.raises(ValueError, match="memory_save_interval must be 1 or more, not 0"):
        dataclasses.replace(plain, memory_save_interval=0)
    with pytest.raises(ValueError, match="--use-torch-fsdp2"):
        Settings(entry="train.py", memory_save_interval=5, arguments=("--use-torch-fsdp2",))
    with pytest.raises(ValueError, match="needs the script's --save"):
        Settings(entry="train.py", memory_save_interval=5)


# A killed driver is started again, and its job continues.


LIMIT_S = 500.0


def test_a_driver_is_started_again(pool: Pool, runner: Runner, run_dir: Path) -> None:
    del pool  # The job takes the rest of its cluster.
    folder = run_dir / "job"
    hold = {"generation": 0, "rank": 0, "when": STRIKE, "what": f"hold:{run_dir}/never"}
    variables = {**ENVIRONMENT, "SCRIPTED_FAULTS": json.dumps([hold])}
    command = [sys.executable, "-W", "ignore", "-m", "megatron_byteps_ray", "--folder", str(folder)]
    command += ["--address", ray.get_runtime_context().gcs_address]
    command += ["--cpus-per-rank", "0.5", "--preload", "pretrain_dpu_gpt"]
    for path in ("build/Megatron-LM", ".", "tests", "scripts"):
        command += ["--python-path", str(ROOT / path)]
    for name, value in variables.items():
        command += ["--environment", f"{name}={value}"]
    entry = ["bench.ray_failures.faulty_gpt:main", "--", *MODEL, "--train-iters", str(STEPS)]
    entry += ["--save", str(run_dir / "saved"), "--save-interval", str(SAVE_EVERY)]
    environment = {**os.environ, "RAY_worker_niceness": "0"}
    with (run_dir / "driver.log").open("wb") as log:
        first = subprocess.Popen([*command, *entry], env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + LIMIT_S
            while len(record_of_steps(folder)) < STRIKE - 1:
                assert first.poll() is None, "the driver ended by itself"
                assert time.monotonic() < deadline, "no steps"
                time.sleep(0.1)
        finally:
            first.send_signal(signal.SIGKILL)
            first.wait()
        state = json.loads((folder / "job.json").read_text())
        assert (state["state"], state["generation"]) == ("running", 0)
        again = [*command, "--resume", *entry]
        subprocess.run(again, env=environment, stdout=log, stderr=log, timeout=LIMIT_S, check=True)
    state = json.loads((folder / "job.json").read_text())
    assert (state["state"], state["generation"], state["restarts"]) == ("done", 1, 0)
    steps = record_of_steps(folder)
    numbers = {n: [s["step"] for s in steps if s["generation"] == n] for n in (0, 1)}
    assert numbers[0] == list(range(1, STRIKE))
    # Training continues from the last checkpoint.
    assert numbers[1] == list(range(SAVE_EVERY + 1, STEPS + 1))
    whole = runner.uninterrupted(Case(title="")).losses
    assert all([step["values"]["lm loss"]] == whole[step["step"]] for step in steps)
