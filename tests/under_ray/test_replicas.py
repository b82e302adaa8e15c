"""Replicas under Ray: one that is lost is restarted alone; a lost server is replaced."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bench.ray_failures.cases import CASES, MODEL, STEPS, Runner
from bench.ray_failures.nodes import LIMIT_S, Nodes
from megatron_byteps_ray import incarnation
from megatron_byteps_ray.draining import draining_nodes
from megatron_byteps_ray.job import record_of_steps
from megatron_byteps_ray.pool import Pool
from megatron_byteps_ray.replicas import Replicas
from megatron_byteps_ray.settings import Settings
from scripts.ports import free_ports

Events = list[list[dict[str, Any]]]


def run(
    settings: Settings,
    folder: Path,
    faults: list[dict[str, Any]],
    on_event: Callable[[Replicas, int, dict[str, Any]], None] | None = None,
    **environment: str,
) -> Events:
    """Two replicas of one rank, each with a warm spare, in the room that the pool leaves."""
    assert MODEL[-2] == "--dpu-reduce-route", "replicas have one route alone"
    of_job = replace(
        settings,
        ranks=2,
        replicas=2,
        spares=1,
        cpus_per_rank=0.5,
        server_cpus=0.5,
        folder=folder,
        arguments=(*MODEL[:-2], "--train-iters", str(STEPS), *settings.arguments),
        environment={
            **settings.environment,
            **environment,
            "SCRIPTED_FAULTS": json.dumps(faults),
            "SCRIPTED_STATE": str(folder / "replica1" / "job.json"),
        },
    )
    events: Events = [[], []]

    def listener(replica: int) -> Callable[[dict[str, Any]], None]:
        def note(event: dict[str, Any]) -> None:
            events[replica].append(event)
            if on_event is not None:
                on_event(job, replica, event)

        return note

    job = Replicas(of_job, listener)
    job.run()
    return events


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def losses(folder: Path, replica: int) -> dict[int, float]:
    """Of its last life; Megatron sums them over replicas."""
    steps = record_of_steps(folder / f"replica{replica}")
    last = max(step["incarnation"] for step in steps)
    return {s["step"]: s["values"]["lm loss"] for s in steps if s["incarnation"] == last}


def test_a_lost_replica_is_restarted_alone(pool: Pool, settings: Settings, run_dir: Path) -> None:
    faults = [
        {"incarnation": 0, "replica": 1, "rank": 0, "when": 5, "what": "actor"},
        {"incarnation": 0, "replica": 0, "rank": 0, "when": 8, "what": "joiner:1"},
    ]
    port = free_ports(3, host="0.0.0.0")
    first, second = run(settings, run_dir / "job", faults, BYTEPS_METRICS_PORT=str(port))
    assert not of(first, "failure"), "it goes on"
    # All are on one machine, and no two at one port.
    lists = [run_dir / "job" / name / "prometheus.json" for name in ("", "replica0", "replica1")]
    told = [json.loads(path.read_text())[0]["targets"][0] for path in lists]
    assert [int(where.rpartition(":")[2]) for where in told] == [port, port + 1, port + 2]
    (failure,) = of(second, "failure")
    assert "rank 0 was lost with its actor" in str(failure["failure"])
    assert [len(of(one, "done")) for one in (first, second)] == [1, 1]
    whole, joined = losses(run_dir / "job", 0), losses(run_dir / "job", 1)
    assert sorted(whole) == list(range(1, STEPS + 1)), "no step is done twice"
    assert sorted(joined) == list(range(9, STEPS + 1)), "it joins after the step that waited"
    assert joined == {step: whole[step] for step in joined}


def test_a_replica_leaves_a_machine_that_is_drained(
    pool: Pool, settings: Settings, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are on one machine here: Ray says to one of them alone that it is drained."""
    there = {"node": ""}

    def draining() -> set[str]:
        return {there["node"]} if threading.current_thread().name == "replica 1" else set()

    def note(job: Replicas, replica: int, event: dict[str, Any]) -> None:
        if replica == 1 and event["event"] == "step" and event["incarnation"] == 0:
            there["node"] = job.jobs[1].pool.assigned[0].facts["node"]
        if replica == 1 and event["event"] == "failure":
            there["node"] = ""

    monkeypatch.setattr(incarnation, "draining_nodes", draining)
    faults = [
        {"incarnation": 0, "replica": 1, "rank": 0, "when": 5, "what": "told"},
        {"incarnation": 0, "replica": 0, "rank": 0, "when": 8, "what": "joiner:1"},
    ]
    first, second = run(settings, run_dir / "job", faults, note)
    assert not of(first, "failure")
    (failure,) = of(second, "failure")
    assert str(failure["failure"]) == "rank 0 was told to end, and has left"
    said = "\n".join(failure["failure"].causes[0].lines)
    assert "and leaves after iteration 5" in said, "that is the step that it was in"
    whole, joined = losses(run_dir / "job", 0), losses(run_dir / "job", 1)
    assert sorted(joined) == list(range(9, STEPS + 1))
    assert joined == {step: whole[step] for step in joined}


def test_a_pool_passes_over_machines_that_are_drained(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = {slot.facts["node"] for slot in pool.warm()}
    monkeypatch.setattr(pool, "_draining", {node})
    assert pool.warm() == []


class Waits:
    """An actor that uses a node."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def test_ray_tells_which_machines_are_drained(pool: Pool, run_dir: Path) -> None:
    nodes = Nodes(run_dir / "nodes")
    try:
        node = nodes.add()
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        # A node that nobody uses is gone at once.
        waits: Any = ray.remote(Waits)
        user = waits.options(num_cpus=1, scheduling_strategy=there).remote()
        assert ray.get(user.node.remote()) == node
        assert node not in draining_nodes()
        subprocess.run(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", node),
                *("--address", ray.get_runtime_context().gcs_address),
                *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"),
                *("--deadline-remaining-seconds", "3600"),
            ],
            check=True,
            timeout=LIMIT_S,
        )
        deadline = time.monotonic() + LIMIT_S
        while node not in draining_nodes():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        nodes.close()


def test_a_lost_server_of_replicas_is_replaced(
    pool: Pool, settings: Settings, run_dir: Path
) -> None:
    go = run_dir / "go"
    faults = [
        {"incarnation": 0, "replica": 0, "rank": 0, "when": 5, "what": f"hold:{go}"},
    ]

    def lose_server(job: Replicas, replica: int, event: dict[str, Any]) -> None:
        if event["event"] == "step" and replica == 0 and not go.exists():
            ray.kill(job.pool.byteps[1])
            go.touch()

    both = run(settings, run_dir / "job", faults, lose_server, BYTEPS_REPLACE_SERVERS_S="300")
    assert not any(of(events, "failure") for events in both)
    whole, other = losses(run_dir / "job", 0), losses(run_dir / "job", 1)
    assert sorted(whole) == list(range(1, STEPS + 1)) and whole == other


def test_a_lost_server_is_replaced(runner: Runner, settings: Settings) -> None:
    """Also without replicas no rank is restarted."""
    environment = {**settings.environment, "BYTEPS_REPLACE_SERVERS_S": "300"}
    there = Runner(runner.pool, replace(settings, environment=environment), runner.folder)
    case = replace(CASES["server"], title="a server is replaced", incarnations=1, blames="")
    outcome = there.run("replaced", case)
    assert not outcome.of("failure")
    assert {step: values[0] for step, values in outcome.losses.items()} == {
        step: values[0] for step, values in runner.uninterrupted(case).losses.items()
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ranks": 3}, "3 ranks are not 2 replicas of equal size"),
        ({"servers": 0}, "replicas meet at servers"),
        ({"min_ranks": 1}, "min_ranks does not go with replicas"),
        ({"memory_save_interval": 2}, "memory_save_interval does not go with replicas"),
    ],
)
def test_what_replicas_do_not_go_with(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Settings(**{"entry": "script.py", "ranks": 2, "replicas": 2, **changes})
