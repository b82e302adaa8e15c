"""Starts the processes of a job, each on its host. A failure or timeout of one ends all, with the
reason."""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from bench.kit.emulation import Host
from bench.kit.plan import Topology
from scripts import children
from scripts.children import LAUNCHER_VARIABLES, Spawned, end_all, last_lines

START_S = 150.0
_GRACE_S = 5.0
_POLL_S = 0.02
_LOG_LINES = 30
_ROOT = Path(__file__).resolve().parents[2]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Secret of every job that this process launches.
_SECRET = secrets.token_hex(32)


class LaunchError(Exception):
    """Error of a launch. The text has the ends of its logs."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    # A second signal would interrupt the cleanup. It is ignored, because the cleanup is bounded in
    # time.
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def become_interruptible() -> None:
    """Raise KeyboardInterrupt at the first SIGINT, SIGTERM or SIGHUP, and ignore later ones.

    This works even if a shell has started the program in the background with SIGINT ignored.
    """
    for number in _SIGNALS:
        signal.signal(number, _interrupt)


def server_executable() -> str:
    """Return the path of byteps-server: next to this Python, or on PATH. Raises LaunchError."""
    try:
        return children.server_executable()
    except FileNotFoundError as error:
        raise LaunchError(str(error)) from None


def plain_environment() -> dict[str, str]:
    """Return this process's environment without variables that assign a process to a job.

    Settings of the engine (BYTEPS_...) are kept, so that they can be compared.
    """
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(("DMLC_", "TORCHELASTIC_"))
    }
    if not plain.keys() & {"BYTEPS_SECRET", "BYTEPS_SECRET_FILE", "BYTEPS_AUTH"}:
        plain["BYTEPS_SECRET"] = _SECRET
    # Each process has one thread, because many processes of an emulated cluster share few cores.
    return {**plain, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Processes:
    """Processes of a launch: a context manager that ends those that still run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[Spawned] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self._started, _GRACE_S)

    def start(
        self, title: str, command: Sequence[str], host: Host, environment: Mapping[str, str]
    ) -> int:
        """Start a process on a host, and return its pid. The process ends when this one ends."""
        process = Spawned(title, host.command(command), environment, self.folder)
        self._started.append(process)
        return process.pid

    def text_of(self, title: str) -> str:
        """Return everything that a process has printed so far."""
        (process,) = (process for process in self._started if process.title == title)
        return process.text

    def kill(self, title: str) -> None:
        """Kill a process by SIGKILL. Its end then does not count as a failure."""
        (process,) = (process for process in self._started if process.title == title)
        self._started.remove(process)
        process.kill()

    def wait_file(self, path: Path, timeout_s: float) -> str:
        """Wait for a file that a process writes. Return its content."""
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            self._demand_well()
            if time.monotonic() > deadline:
                raise LaunchError(f"{path.name} was not written in {timeout_s:g} s\n{self.logs()}")
            time.sleep(_POLL_S)
        return path.read_text()

    def wait_all(self, timeout_s: float) -> None:
        """Wait for the end of every process. Raises LaunchError if a process fails or times out."""
        deadline = time.monotonic() + timeout_s
        while late := [process.title for process in self._started if process.running]:
            self._demand_well()
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{', '.join(late)} still ran after {timeout_s:g} s (--timeout)\n{self.logs()}"
                )
            time.sleep(_POLL_S)
        self._demand_well()

    def _demand_well(self) -> None:
        failed = {process.title: process.status for process in self._started if process.status}
        if failed:
            time.sleep(1.0)  # gives the other processes time to notice and log the reason
            raise LaunchError(f"exit status {failed}\n{self.logs()}")

    def logs(self) -> str:
        """Return the last lines of every log that is not empty."""
        parts = []
        for process in self._started:
            if lines := last_lines(process.log, _LOG_LINES):
                parts += [f"---- last lines of {process.title}", lines]
        return "\n".join(parts)


class Placement:
    """Assigns each process of a topology to a host.

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
        """Whether NCCL must treat each host of workers as a separate machine."""
        # The scheduler moves no gradients, so it needs no host of its own, and runs next to worker
        # 0.
        self.scheduler = self.workers[0]

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host among the workers' hosts."""
        return rank // self.ranks_per_host


def start_nodes(
    placement: Placement, processes: Processes, environment: dict[str, str]
) -> tuple[list[int], dict[str, str]]:
    """Start scheduler and servers. Return their pids, and the variables with which processes join
    them."""
    port_file = processes.folder / "scheduler.port"
    job = {
        "DMLC_PS_ROOT_URI": placement.scheduler.address,
        "DMLC_PS_ROOT_PORT": "0",
        "DMLC_NUM_WORKER": str(len(placement.workers)),
        "DMLC_NUM_SERVER": str(len(placement.servers)),
    }
    if len(placement.scheduler.interfaces) > 1:
        # Virtual NICs are named, because they are not chosen automatically.
        nics = ",".join(placement.scheduler.interfaces)
        job["BYTEPS_NICS"] = environment.get("BYTEPS_NICS", nics)
    pids = [
        processes.start(
            "scheduler",
            [*_node_command("scheduler"), "--port-file", str(port_file)],
            placement.scheduler,
            {**environment, **job},
        )
    ]
    job["DMLC_PS_ROOT_PORT"] = processes.wait_file(port_file, START_S).split()[1]
    for index, host in enumerate(placement.servers):
        pids.append(start_server(index, host, processes, {**environment, **job}))
    return pids, job


def start_server(
    index: int, host: Host, processes: Processes, environment: Mapping[str, str]
) -> int:
    """Start a server, ``server-INDEX``, of the job in the environment. Returns its pid."""
    return processes.start(f"server-{index}", _node_command("server"), host, environment)


def _node_command(role: str) -> list[str]:
    return [server_executable(), "--die-with-parent", "--role", role]


def start_workers(
    program: str,
    spec: dict[str, Any],
    result: Path,
    placement: Placement,
    processes: Processes,
    environment: dict[str, str],
) -> None:
    """Start every rank. It runs a module with a specification file and a result file."""
    spec_file = processes.folder / "spec.json"
    spec_file.write_text(json.dumps(spec))
    # This path comes before the user's PYTHONPATH, which may have the packages of a bundle.
    paths = [str(_ROOT), environment.get("PYTHONPATH", "")]
    environment = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for rank, host in enumerate(placement.workers):
        variables = rank_variables(rank, placement)
        command = [children.python_of_ranks(), "-m", program, str(spec_file), str(result)]
        processes.start(f"worker-{rank}", command, host, {**environment, **variables})


def run_job(
    program: str,
    spec: dict[str, Any],
    placement: Placement,
    processes: Processes,
    settings: Mapping[str, str],
    timeout_s: float,
) -> Any:
    """Start the nodes and every rank of a job with these settings. Return rank 0's result.

    Adds "rendezvous" and "timeout_s" to `spec`. Raises LaunchError if a process fails or times out.
    """
    environment = plain_environment()
    _, job = start_nodes(placement, processes, environment)
    described = {**spec, "rendezvous": f"{processes.folder}/ranks", "timeout_s": timeout_s}
    result = processes.folder / "result.json"
    start_workers(
        program, described, result, placement, processes, {**environment, **job, **settings}
    )
    processes.wait_all(timeout_s)
    return json.loads(result.read_text(encoding="utf-8"))


def rank_variables(rank: int, placement: Placement) -> dict[str, str]:
    """Return the variables that a launcher would set for a rank."""
    size, host, number = len(placement.workers), placement.workers[rank], placement.host_of(rank)
    first = number * placement.ranks_per_host
    connections = {}
    if placement.uneven > 1:
        ahead = rank - first == number % placement.ranks_per_host
        connections["BYTEPS_CONNECTIONS"] = str(placement.uneven if ahead else 1)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - first),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(min(placement.ranks_per_host, size - first)),
        "BYTEPS_HOST_ID": f"bench-host-{number}",
        "BYTEPS_LOCAL_SERVERS": str(placement.local_servers),
        "BYTEPS_SERVERS_PER_MACHINE": str(placement.servers_per_machine),
        "GLOO_SOCKET_IFNAME": ",".join(host.interfaces),
        **connections,
        **(_as_machine(number, host, placement.ranks_per_host) if placement.apart else {}),
    }


def _as_machine(number: int, host: Host, ranks: int) -> dict[str, str]:
    """Return variables that hide from NCCL that hosts share this machine."""
    variables = {
        "NCCL_HOSTID": f"bench-host-{number}",
        "NCCL_SOCKET_IFNAME": ",".join(host.interfaces),
        "NCCL_IB_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    if ranks == 1:  # the ranks of a host may use P2P and shared memory
        variables |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    return variables
