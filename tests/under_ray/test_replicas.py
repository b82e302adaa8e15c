"""Replicas and machines under Ray.

A lost replica is restarted alone, a lost server is replaced, and a machine that was cut off
returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bench.kit.emulation import Emulation, Host
from bench.kit.plan import Topology
from bench.ray_failures.cases import CASES, ENVIRONMENT, MODEL, STEPS, Runner
from bench.ray_failures.nodes import LIMIT_S, Nodes
from megatron_byteps_ray import generation
from megatron_byteps_ray.cluster import Pool, draining_nodes
from megatron_byteps_ray.job import Replicas, record_of_steps
from megatron_byteps_ray.settings import Settings
from scripts.children import free_ports

Events = list[list[dict[str, Any]]]


def run(
    settings: Settings,
    folder: Path,
    faults: list[dict[str, Any]],
    on_event: Callable[[Replicas, int, dict[str, Any]], None] | None = None,
    **environment: str,
) -> Events:
    """Run two replicas of one rank, each with a warm spare, on the pool's free cores."""
    assert MODEL[-2] == "--dpu-reduce-backend", "replicas have one route alone"
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
    """Return the losses by step since the replica's last start, which Megatron sums over
    replicas."""
    steps = record_of_steps(folder / f"replica{replica}")
    last = max(step["generation"] for step in steps)
    return {s["step"]: s["values"]["lm loss"] for s in steps if s["generation"] == last}


def test_a_lost_replica_is_restarted_alone(pool: Pool, settings: Settings, run_dir: Path) -> None:
    faults = [
        {"generation": 0, "replica": 1, "rank": 0, "when": 5, "what": "actor"},
        {"generation": 0, "replica": 0, "rank": 0, "when": 8, "what": "joiner:1"},
    ]
    port = free_ports(3, host="0.0.0.0")
    first, second = run(settings, run_dir / "job", faults, BYTEPS_METRICS_PORT=str(port))
    assert not of(first, "failure"), "it goes on"
    # All ranks are on the same machine, with different ports.
    lists = [run_dir / "job" / name / "prometheus.json" for name in ("", "replica0", "replica1")]
    addresses = [json.loads(path.read_text())[0]["targets"][0] for path in lists]
    assert [int(where.rpartition(":")[2]) for where in addresses] == [port, port + 1, port + 2]
    (failure,) = of(second, "failure")
    assert "rank 0 was lost with its actor" in str(failure["failure"])
    assert [len(of(log_of, "done")) for log_of in (first, second)] == [1, 1]
    whole, joined = losses(run_dir / "job", 0), losses(run_dir / "job", 1)
    assert sorted(whole) == list(range(1, STEPS + 1)), "no step is done twice"
    assert sorted(joined) == list(range(9, STEPS + 1)), "it joins after the step that waited"
    assert joined == {step: whole[step] for step in joined}


def test_a_replica_leaves_a_machine_that_is_drained(
    pool: Pool, settings: Settings, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All replicas are on one machine here, so Ray reports draining to only one of them."""
    there = {"node": ""}

    def draining() -> set[str]:
        return {there["node"]} if threading.current_thread().name == "replica 1" else set()

    def note(job: Replicas, replica: int, event: dict[str, Any]) -> None:
        if replica == 1 and event["event"] == "step" and event["generation"] == 0:
            there["node"] = job.jobs[1].pool.assigned[0].facts["node"]
        if replica == 1 and event["event"] == "failure":
            there["node"] = ""

    monkeypatch.setattr(generation, "draining_nodes", draining)
    faults = [
        {"generation": 0, "replica": 1, "rank": 0, "when": 5, "what": "told"},
        {"generation": 0, "replica": 0, "rank": 0, "when": 8, "what": "joiner:1"},
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
        # A drained node without actors is removed at once.
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
        {"generation": 0, "replica": 0, "rank": 0, "when": 5, "what": f"hold:{go}"},
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
    """A server is replaced without a restart of ranks, also in a job without replicas."""
    environment = {**settings.environment, "BYTEPS_REPLACE_SERVERS_S": "300"}
    there = Runner(runner.pool, replace(settings, environment=environment), runner.folder)
    case = replace(CASES["server"], title="a server is replaced", generations=1, blames="")
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


# Several emulated machines: Ray nodes in network namespaces, one of which is cut off.


BLINK_LIMIT_S = 400.0
BLINK_STEPS, BLINK, STRIKE = 40, 3, 20
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
GCS_PORT = 6379
ENV = {**os.environ, "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}
"""The user's Ray token is not used, because only these tests reach the namespaces."""

# Each step adds to the value that rank 0 saves; a restart continues from there.
SCRIPT = """
import json, os, sys, time
import torch
import byteps.torch as bps
from megatron_byteps_ray import report

folder, steps = sys.argv[1], int(sys.argv[2])
bps.init()
rank = int(os.environ["RANK"])
state = {"step": 0, "total": 0.0}
if os.path.exists(f"{folder}/saved"):
    with open(f"{folder}/saved") as file:
        state = json.load(file)
for step in range(state["step"] + 1, steps + 1):
    values = torch.full((4,), float(step * (rank + 1)))
    bps.push_pull_inplace(values, average=False, name="x")
    state = {"step": step, "total": state["total"] + values[0].item()}
    if rank == 0:
        with open(f"{folder}/saving", "w") as file:
            json.dump(state, file)
        os.replace(f"{folder}/saving", f"{folder}/saved")
    report(step, tokens=4, total=state["total"])
    time.sleep(0.3)
bps.shutdown()
"""


class Machines:
    """Ray nodes, one per emulated host."""

    def __init__(self, emulation: Emulation, folder: Path, temp_dir: str) -> None:
        self.emulation = emulation
        self._folder = folder
        self._temp_dir = temp_dir
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        return f"{self.emulation.hosts[0].address}:{GCS_PORT}"

    def start(self, index: int, cpus: int) -> None:
        """Start a node with this number of cores; the first node is the head.

        Ray gives a node 30 s, which is too short on a busy machine: the start is then repeated.
        """
        host = self.emulation.hosts[index]
        command = [*RAY, "start", "--block", "--disable-usage-stats", "--num-cpus", str(cpus)]
        command += ["--num-gpus", "0", "--node-ip-address", host.address]
        command += ["--object-store-memory", str(100 << 20)]
        if index == 0:
            command += ["--head", "--port", str(GCS_PORT), "--include-dashboard", "false"]
            command += ["--temp-dir", self._temp_dir, "--resources", json.dumps({"byteps": 2})]
        else:
            command += ["--address", self.address]
        # A node without an answer for 15 s is lost.
        patience = {"period_ms": "2000", "timeout_ms": "5000", "failure_threshold": "3"}
        health = {f"RAY_health_check_{name}": value for name, value in patience.items()}
        deadline = time.monotonic() + BLINK_LIMIT_S
        while True:
            log = self._folder / f"node{index}.log"
            with log.open("wb") as output:
                node = self._nodes[index] = subprocess.Popen(
                    host.command(command),
                    env={**ENV, **health},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            while node.poll() is None and "Ray runtime started" not in log.read_text():
                time.sleep(0.2)
            if node.poll() is None:
                return
            assert "timed out during startup" in log.read_text(), log.read_text()
            assert time.monotonic() < deadline, "no node starts"

    def wait_end(self, index: int) -> None:
        """Wait until a node and all its processes have ended by themselves."""
        self._nodes[index].wait(BLINK_LIMIT_S)
        _await(lambda: not _processes(self.emulation.hosts[index]), "processes are left")

    def close(self) -> None:
        for index, node in self._nodes.items():
            for pid in _processes(self.emulation.hosts[index]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            node.wait()


def _processes(host: Host) -> list[int]:
    """Get the processes of an emulated host."""
    listed = subprocess.run(
        ["ip", "netns", "pids", str(host.namespace)], capture_output=True, text=True, check=True
    )
    return [int(pid) for pid in listed.stdout.split()]


def _ranks(folder: Path) -> list[str]:
    """Get the address of each rank's machine."""
    state = json.loads((folder / "job.json").read_text())
    return [rank["address"] for rank in state["ranks"]]


def _await(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + BLINK_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.fixture
def machines(run_dir: Path) -> Iterator[Machines]:
    topology = Topology(workers=3, servers=1, emulated_hosts=4, link_bits=1_000_000_000)
    with (
        # Ray's sockets need a short path, and its processes may still write there when they end.
        tempfile.TemporaryDirectory(prefix="rm-", dir="/tmp", ignore_cleanup_errors=True) as short,
        Emulation(topology) as emulation,
    ):
        made = Machines(emulation, run_dir, short)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.requires("root")
def test_a_machine_is_cut_off_and_comes_back(machines: Machines, run_dir: Path) -> None:
    (run_dir / "script.py").write_text(SCRIPT)
    folder = run_dir / "job"
    machines.start(0, 1)
    for index in (1, 2, 3):
        machines.start(index, 1)
    command = [sys.executable, "-W", "ignore", "-m", "megatron_byteps_ray"]
    command += ["--address", machines.address, "--folder", str(folder), "--preload", "torch"]
    command += ["--ranks", "2", "--spares", "1", "--server-resource", "byteps"]
    command += ["--server-cpus", "0.25"]
    # A machine that is cut off for less time is not lost.
    for name, value in {**ENVIRONMENT, "BYTEPS_PEER_TIMEOUT_S": "20"}.items():
        command += ["--environment", f"{name}={value}"]
    command += [str(run_dir / "script.py"), "--", str(run_dir), str(BLINK_STEPS)]
    with (run_dir / "driver.log").open("wb") as log:
        driver = subprocess.Popen(
            machines.emulation.hosts[0].command(command),
            env=ENV,
            cwd=run_dir,
            stdout=log,
            stderr=log,
        )
        try:

            def at(step: int, generation: int) -> bool:
                assert driver.poll() is None, (run_dir / "driver.log").read_text()
                done = [(s["generation"], s["step"]) for s in record_of_steps(folder)]
                return any(reached >= (generation, step) for reached in done)

            _await(lambda: at(BLINK, 0), "no steps")
            hosts = [host.address for host in machines.emulation.hosts]
            lost = hosts.index(_ranks(folder)[0])
            machines.emulation.cut_link(lost, 0, cut=True)
            time.sleep(2.0)
            machines.emulation.cut_link(lost, 0, cut=False)
            _await(lambda: at(STRIKE, 0), "no steps after a short cut")
            machines.emulation.cut_link(lost, 0, cut=True)
            _await(lambda: at(1, 1), "no steps on another machine")
            machines.emulation.cut_link(lost, 0, cut=False)
            # Ray considers the node lost. The rank on it ends with the node, and a new node joins.
            machines.wait_end(lost)
            machines.start(lost, 1)
            assert driver.wait(BLINK_LIMIT_S) == 0, (run_dir / "driver.log").read_text()
        finally:
            driver.kill()
            driver.wait()
    state = json.loads((folder / "job.json").read_text())
    assert (state["state"], state["restarts"]) == ("done", 1), state
    assert sorted(_ranks(folder)) == sorted({*hosts[1:]} - {hosts[lost]})
    steps = record_of_steps(folder)
    assert max(step["step"] for step in steps) == BLINK_STEPS
    for step in steps:
        assert step["values"]["total"] == 3.0 * step["step"] * (step["step"] + 1) / 2
