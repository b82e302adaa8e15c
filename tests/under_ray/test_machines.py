"""Machines that really are several: Ray nodes in network namespaces, one of which is cut off.

The first has the driver, the scheduler and the server; of three others two have a rank, and one a
warm spare. What they share is the file system, as a cluster does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.kit.emulation import Emulation, Host
from bench.kit.plan import Topology
from bench.ray_failures.cases import ENVIRONMENT
from megatron_byteps_ray.job import record_of_steps

pytestmark = pytest.mark.requires("root")

LIMIT_S = 400.0
STEPS, BLINK, STRIKE = 40, 3, 20
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
GCS_PORT = 6379
ENV = {**os.environ, "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}
"""Without the token that this user may have: nobody else reaches the namespaces."""

# Each step adds to what rank 0 saves; a restart goes on from there.
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
        """A node of so many cores; the first one is the head.

        Ray gives a node 30 s, which a busy machine does not keep: then it is tried again.
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
        # A node that does not answer for 15 s is lost.
        patience = {"period_ms": "2000", "timeout_ms": "5000", "failure_threshold": "3"}
        health = {f"RAY_health_check_{name}": value for name, value in patience.items()}
        deadline = time.monotonic() + LIMIT_S
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
        """Until a node has ended by itself, and all that ran there."""
        self._nodes[index].wait(LIMIT_S)
        _await(lambda: not _processes(self.emulation.hosts[index]), "processes are left")

    def close(self) -> None:
        for index, node in self._nodes.items():
            for pid in _processes(self.emulation.hosts[index]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            node.wait()


def _processes(host: Host) -> list[int]:
    """Those of an emulated host."""
    found = subprocess.run(
        ["ip", "netns", "pids", str(host.namespace)], capture_output=True, text=True, check=True
    )
    return [int(pid) for pid in found.stdout.split()]


def _ranks(folder: Path) -> list[str]:
    """The address of each rank's machine."""
    state = json.loads((folder / "job.json").read_text())
    return [rank["address"] for rank in state["ranks"]]


def _await(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.fixture
def machines(run_dir: Path) -> Iterator[Machines]:
    topology = Topology(workers=3, servers=1, emulated_hosts=4, link_bits=1_000_000_000)
    with (
        # Ray's sockets need a short path, and its processes may still write there as they end.
        tempfile.TemporaryDirectory(prefix="rm-", dir="/tmp", ignore_cleanup_errors=True) as short,
        Emulation(topology) as emulation,
    ):
        made = Machines(emulation, run_dir, short)
        try:
            yield made
        finally:
            made.close()


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
    # A machine that is cut off for less time is not given up.
    for name, value in {**ENVIRONMENT, "BYTEPS_PEER_TIMEOUT_S": "20"}.items():
        command += ["--environment", f"{name}={value}"]
    command += [str(run_dir / "script.py"), "--", str(run_dir), str(STEPS)]
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
                done = [(s["incarnation"], s["step"]) for s in record_of_steps(folder)]
                return any(one >= (generation, step) for one in done)

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
            # Ray has given it up; the rank there ends with its node, and a new node joins.
            machines.wait_end(lost)
            machines.start(lost, 1)
            assert driver.wait(LIMIT_S) == 0, (run_dir / "driver.log").read_text()
        finally:
            driver.kill()
            driver.wait()
    state = json.loads((folder / "job.json").read_text())
    assert (state["state"], state["restarts"]) == ("done", 1), state
    assert sorted(_ranks(folder)) == sorted({*hosts[1:]} - {hosts[lost]})
    steps = record_of_steps(folder)
    assert max(step["step"] for step in steps) == STEPS
    for step in steps:
        assert step["values"]["total"] == 3.0 * step["step"] * (step["step"] + 1) / 2
