"""Additional nodes of a Ray cluster on this machine, each of which can be lost like a machine; and
a script for jobs on them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import ray

LIMIT_S = 300.0
_MARK = "BENCH_RAY_NODE"
_OBJECT_STORE_BYTES = 100 << 20
_CALL_S = 120.0


class Nodes:
    """Nodes in addition to that of ``cluster``. This process is the cluster's driver."""

    def __init__(self, folder: Path) -> None:
        """``folder``: folder for logs."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._names: dict[str, str] = {}

    @property
    def known(self) -> set[str]:
        """Return Ray's ids of the nodes that are running."""
        return set(self._names)

    def add(self, cpus: int = 1, gpus: int = 0, mask: str | None = None) -> str:
        """Start a node. Return Ray's id of it. Ray assumes that the node has this number of GPUs.

        ``mask``: the node's CUDA_VISIBLE_DEVICES.

        Ray gives a node 30 s to start, and the node gives its agents 15 s. A busy machine exceeds
        these limits, so the start is repeated.

        Raises:
            RuntimeError: the node did not start. The text has the end of its log.
        """
        deadline = time.monotonic() + LIMIT_S
        while True:
            name = f"node-{uuid.uuid4().hex[:12]}"
            log = self._folder / f"{name}.log"
            if self._start(name, cpus, gpus, mask, log):
                while time.monotonic() < deadline:
                    for node in ray.nodes():
                        if node["Alive"] and name in node["Resources"]:
                            self._names[node["NodeID"]] = name
                            return node["NodeID"]
                    time.sleep(0.2)
            _kill(name)
            text = log.read_text(errors="replace")
            if "timed out during startup" not in text or time.monotonic() > deadline:
                raise RuntimeError(f"a node of Ray did not start:\n{text[-2000:]}")

    def _start(self, name: str, cpus: int, gpus: int, mask: str | None, log: Path) -> bool:
        """Start a node. Return whether Ray reports success."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
        command += ["--address", ray.get_runtime_context().gcs_address]
        command += ["--node-ip-address", "127.0.0.1", "--num-cpus", str(cpus)]
        command += ["--num-gpus", str(gpus)]
        command += ["--object-store-memory", str(_OBJECT_STORE_BYTES)]
        command += ["--resources", json.dumps({name: 1}), "--dashboard-agent-listen-port", "0"]
        environment = {**os.environ, _MARK: name, "RAY_worker_niceness": "0"}
        environment |= {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
        with log.open("wb") as output:
            started = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=LIMIT_S,
                check=False,
            )
        return started.returncode == 0

    def lose(self, node: str) -> None:
        """Kill all processes of a node: Ray's, the fork server, and the ranks."""
        _kill(self._names.pop(node))

    def close(self) -> None:
        """Kill the remaining nodes."""
        for node in list(self._names):
            self.lose(node)


def _kill(name: str) -> None:
    """Kill a node's processes. All are stopped first, so that none sees the end of another, or
    starts a new process."""
    stopped: dict[int, psutil.Process] = {}
    while True:
        running = [process for process in _processes(name) if process.pid not in stopped]
        if not running:
            break
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
            stopped[process.pid] = process
    for process in stopped.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(stopped.values()), timeout=_CALL_S)


def _processes(name: str) -> list[psutil.Process]:
    """Return the processes of a node. Their environment names the node; a process title may have
    overwritten their children's."""
    by_pid: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == name:
                for member in (process, *process.children(recursive=True)):
                    by_pid[member.pid] = member
    return list(by_pid.values())


# This script trains nothing. It makes three steps, each with a sum.
SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
import byteps.torch as bps
from megatron_byteps_ray import report

dist.init_process_group("gloo")
bps.init()
rank = dist.get_rank()
for step in range(1, 4):
    values = torch.arange(1.0, 5.0) * (rank + 1) * step
    bps.push_pull_inplace(values, average=False, name="x")
    report(step, tokens=4, total=values.sum().item())
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
seen = {"sum": values.tolist(), "arguments": sys.argv[1:], **{n: os.environ[n] for n in names}}
assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(seen, file)
bps.shutdown()
dist.destroy_process_group()
"""
