"""One launch: scheduler, servers and workers of one backend, from their start to their end."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchkit.emulation import Host
from benchkit.errors import LaunchError
from benchkit.measure import Measured
from benchkit.plan import Case, Plan, Topology
from benchkit.processes import Processes, plain_environment, server_executable
from benchkit.sockets import SocketsError, build

_START_S = 150.0
_PACKAGE_FOLDER = Path(__file__).resolve().parent.parent


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


class Placement:
    """Which host each process of a topology runs on.

    Args:
        shares_gpus: whether ranks of several hosts share a GPU.
    """

    def __init__(
        self, topology: Topology, hosts: Sequence[Host], *, shares_gpus: bool = False
    ) -> None:
        self.ranks_per_host = topology.ranks_per_host
        self.uneven = topology.uneven
        used = topology.worker_hosts
        self.workers = [hosts[self.host_of(i) % len(hosts)] for i in range(topology.workers)]
        first = 0 if topology.colocate else used
        around = used if topology.colocate else len(hosts)
        machines = [hosts[(first + i) % around % len(hosts)] for i in range(topology.servers)]
        self.servers = machines * topology.servers_per_machine
        self.servers_per_machine = topology.servers_per_machine
        self.local_servers = topology.local_servers
        self.servers += [hosts[i % len(hosts)] for i in range(used)] * topology.local_servers
        self.apart = any(host.namespace for host in hosts) or shares_gpus
        """Whether NCCL has to take each host of workers for a machine."""
        # It moves no gradients: beside worker 0 it costs no host.
        self.scheduler = self.workers[0]

    def host_of(self, rank: int) -> int:
        """Which of the workers' hosts a rank is on."""
        return rank // self.ranks_per_host


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
        start_workers("benchkit.rank", spec, result, placement, processes, environment)
        processes.wait_all(plan.timeout_s)
        measured = [measured_from_json(entry) for entry in json.loads(result.read_text())]
    busy = max(one.busy for one in measured)
    return Launch(backend=backend, index=index, measured=measured, kept=busy <= plan.max_busy)


def start_nodes(
    placement: Placement, processes: Processes, environment: dict[str, str]
) -> tuple[list[int], dict[str, str]]:
    """Start scheduler and servers; return their pids, and the variables that lead to them."""
    port_file = processes.folder / "scheduler.port"
    job = {
        "DMLC_PS_ROOT_URI": placement.scheduler.address,
        "DMLC_PS_ROOT_PORT": "0",
        "DMLC_NUM_WORKER": str(len(placement.workers)),
        "DMLC_NUM_SERVER": str(len(placement.servers)),
    }
    command = [server_executable(), "--die-with-parent", "--role"]
    pids = [
        processes.start(
            "scheduler",
            [*command, "scheduler", "--port-file", str(port_file)],
            placement.scheduler,
            {**environment, **job},
        )
    ]
    job["DMLC_PS_ROOT_PORT"] = processes.wait_file(port_file, _START_S).split()[1]
    for index, host in enumerate(placement.servers):
        title = f"server-{index}"
        pids.append(processes.start(title, [*command, "server"], host, {**environment, **job}))
    return pids, job


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
    servers = [processes.wait_file(file, _START_S).strip() for file in files]
    return pids, {"library": str(program.library), "servers": servers, "flows": plan.flows}


def start_workers(
    program: str,
    spec: dict[str, Any],
    result: Path,
    placement: Placement,
    processes: Processes,
    environment: dict[str, str],
) -> None:
    """Start every rank: a module, called with the files of the specification and the result."""
    spec_file = processes.folder / "spec.json"
    spec_file.write_text(json.dumps(spec))
    # Before what the user has there: the packages of a bundle, say.
    paths = [str(_PACKAGE_FOLDER), environment.get("PYTHONPATH", "")]
    environment = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for rank, host in enumerate(placement.workers):
        variables = rank_variables(rank, placement)
        command = [sys.executable, "-m", program, str(spec_file), str(result)]
        processes.start(f"worker-{rank}", command, host, {**environment, **variables})


def _told_of_links(plan: Plan) -> dict[str, str]:
    """The rate of emulated links, which hosts cannot find: virtual cards make theirs up."""
    bits = plan.topology.link_bits
    return {"BYTEPS_LINK_GBPS": f"{bits / 1e9:g}"} if bits else {}


def rank_variables(rank: int, placement: Placement) -> dict[str, str]:
    """What a launcher would tell a rank of itself."""
    size, host, number = len(placement.workers), placement.workers[rank], placement.host_of(rank)
    first = number * placement.ranks_per_host
    connections = {}
    if placement.uneven > 1:
        ahead = rank - first == number % placement.ranks_per_host
        connections["BYTEPS_TCP_CONNECTIONS"] = str(placement.uneven if ahead else 1)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - first),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(min(placement.ranks_per_host, size - first)),
        "BYTEPS_HOST_ID": f"bench-host-{number}",
        "BYTEPS_LOCAL_SERVERS": str(placement.local_servers),
        "BYTEPS_SERVERS_PER_MACHINE": str(placement.servers_per_machine),
        "GLOO_SOCKET_IFNAME": host.interface,
        **connections,
        **(_as_machine(number, host, placement.ranks_per_host) if placement.apart else {}),
    }


def _as_machine(number: int, host: Host, ranks: int) -> dict[str, str]:
    """Keep NCCL from seeing that the ranks of this host share a machine with others."""
    variables = {
        "NCCL_HOSTID": f"bench-host-{number}",
        "NCCL_SOCKET_IFNAME": host.interface,
        "NCCL_IB_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    if ranks == 1:  # else those of one host are to use what they have
        variables |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    return variables
