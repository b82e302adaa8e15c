"""Jobs that lose processes go on, with the losses of a job that lost none, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from bench.ray_failures.cases import (
    CASES,
    SAVE_EVERY,
    STEPS,
    STRIKE,
    Case,
    Runner,
    problems,
    several_nodes,
)
from megatron_byteps_ray.job import Job
from megatron_byteps_ray.pool import JobError

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


def test_a_lost_machine_is_survived(runner: Runner, run_dir: Path) -> None:
    case = CASES["node"]
    places: list[list[str]] = []

    def note(event: dict[str, Any], job: Job) -> None:
        if event["event"] == "incarnation":
            places.append([slot.facts["node"] for slot in job.pool.assigned])

    with several_nodes(run_dir) as there:
        outcome = there.run("node", case, note)
    assert problems(case, outcome, runner.uninterrupted(case)) == []
    before, after = places
    # A rank went from one machine to another, and the other rank stayed.
    assert len(set(before)) == len(set(after)) == 2
    assert sum(old == new for old, new in zip(before, after, strict=True)) == 1


def test_a_lost_actor_is_replaced_by_a_spare_at_the_same_rank(runner: Runner) -> None:
    places: list[list[Any]] = []

    def note(event: dict[str, Any], job: Job) -> None:
        if event["event"] == "incarnation":
            places.append([slot.actor for slot in job.pool.assigned])

    runner.run("same-rank", CASES["actor"], note)
    before, after = places
    assert before[0] == after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize(("name", "stay"), [("rank-0", True), ("server", False)])
def test_servers_outlive_ranks_that_fail(runner: Runner, name: str, stay: bool) -> None:
    """Unless the failure may have been theirs."""
    starts: list[list[int]] = []

    def note(event: dict[str, Any], job: Job) -> None:
        if event["event"] == "step":
            starts.append(ray.get([actor.starts.remote() for actor in job.pool.byteps]))

    runner.run(f"servers-{name}", CASES[name], note)
    before, after = starts[0], starts[-1]
    assert after == [count + (not stay) for count in before]


def test_fewer_ranks_where_no_spare_is_left(runner: Runner) -> None:
    """They take the checkpoint: what memory holds is cut for more of them."""

    def lose_spares(event: dict[str, Any], job: Job) -> None:
        if event["event"] == "failure":
            for slot in job.pool.spares():
                job.pool.lose(slot)

    case = Case(title="", faults=CASES["actor"].faults)
    outcome = runner.run("fewer", case, lose_spares, min_ranks=1, memory_save_interval=1)
    assert [event["ranks"] for event in outcome.of("incarnation")] == [2, 1]
    assert outcome.of("fewer")[0]["wanted"] == 2
    assert max(outcome.losses) == STEPS
    (state,) = outcome.of("state")
    assert (state["source"], state["why"]) == ("checkpoint", "2 ranks became 1")
    second = [step["step"] for step in outcome.steps if step["incarnation"] == 1]
    assert second[0] == SAVE_EVERY + 1


def test_a_job_that_never_makes_a_step_is_given_up(runner: Runner) -> None:
    faults = [{"incarnation": n, "rank": 1, "when": "start", "what": "raise"} for n in range(5)]
    with pytest.raises(JobError, match="2 times in a row without a step") as caught:
        runner.run("fruitless", Case(title="", faults=faults), max_fruitless=2)
    assert "RuntimeError: a fault that the script asked for" in str(caught.value)


def test_restarts_are_limited(runner: Runner) -> None:
    faults = [{"incarnation": n, "rank": 0, "when": STRIKE, "what": "kill"} for n in range(5)]
    with pytest.raises(JobError, match=r"failed 1 times \(max_restarts\)"):
        runner.run("limited", Case(title="", faults=faults), max_restarts=0)
