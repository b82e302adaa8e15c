"""One launch: scheduler, servers and workers of one backend, from their start to their end."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.kit.emulation import Host
from bench.kit.errors import LaunchError
from bench.kit.launch import START_S, Placement, start_nodes, start_workers
from bench.kit.plan import Case, Plan
from bench.kit.processes import Processes, plain_environment
from bench.pushpull.measure import Measured
from bench.pushpull.sockets import SocketsError, build


@dataclass(kw_only=True)
class Launch:
    """What one launch came to."""

    backend: str
    index: int
    measured: list[Measured]
    """A case each, in the order of the plan."""
    kept: bool
    """Whether it counts: the machine was not too busy."""

    def as_json(self) -> dict[str, Any]:
        entries = [one.as_json() for one in self.measured]
        return {**self.__dict__, "measured": entries}


def measured_from_json(entry: dict[str, Any]) -> Measured:
    return Measured(**{**entry, "case": Case(**entry["case"])})


def launch(plan: Plan, backend: str, index: int, hosts: Sequence[Host]) -> Launch:
    """Start everything, wait for its end, and read what rank 0 recorded.

    Raises:
        LaunchError: a process failed or was late.
    """
    with (
        tempfile.TemporaryDirectory(prefix="pushpull-bench-") as folder,
        Processes(Path(folder)) as processes,
    ):
        placement = Placement(plan.topology, hosts, shares_gpus=plan.shares_gpus())
        pids: list[int] = []
        environment = plain_environment()
        if backend == "byteps":
            pids, job = start_nodes(placement, processes, environment)
            environment = _told_of_links(plan) | environment | job
        spec: dict[str, Any] = {}
        if backend == "sockets":
            pids, spec["sockets"] = start_sockets(plan, placement, processes, environment)
        spec |= {
            "plan": plan.as_json(),
            "backend": backend,
            "node_pids": pids,
            "rendezvous": f"{folder}/ranks",
        }
        result = Path(folder) / "result.json"
        start_workers("bench.pushpull.rank", spec, result, placement, processes, environment)
        processes.wait_all(plan.timeout_s)
        measured = [measured_from_json(entry) for entry in json.loads(result.read_text())]
    busy = max(one.busy for one in measured)
    return Launch(backend=backend, index=index, measured=measured, kept=busy <= plan.max_busy)


def start_sockets(
    plan: Plan, placement: Placement, processes: Processes, environment: dict[str, str]
) -> tuple[list[int], dict[str, Any]]:
    """Start servers of plain sockets; return their pids, and what workers need to reach them."""
    try:
        program = build()
    except SocketsError as error:
        raise LaunchError(str(error)) from error
    connections = str(len(placement.workers) * plan.flows)
    pids, files = [], []
    for index, host in enumerate(placement.servers):
        files.append(processes.folder / f"sockets-{index}.port")
        command = [str(program.server), host.address, str(files[-1]), connections]
        pids.append(processes.start(f"sockets-{index}", command, host, environment))
    servers = [processes.wait_file(file, START_S).strip() for file in files]
    return pids, {"library": str(program.library), "servers": servers, "flows": plan.flows}


def _told_of_links(plan: Plan) -> dict[str, str]:
    """The rate of emulated links, which hosts cannot find: virtual NICs make theirs up."""
    bits = plan.topology.host_bits
    return {"BYTEPS_LINK_GBPS": f"{bits / 1e9:g}"} if bits else {}
