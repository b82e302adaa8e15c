"""Runs a machine of a job with two machines, each with a server and a worker.

``two_hosts.py OUT NUMBER`` runs in each of two guests with two cables between them. The first
machine also has the scheduler. First come jobs that end well; one of them detects that a path is
silent although its links are up. Then comes a job in which the second machine dies at work. The
first machine writes the messages of its worker and nodes to OUT for the test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import byteps.torch as bps  # once, before the workers are forked
import torch

from tests.multiproc.cluster import Spawned, clean_environment, server_executable
from tests.multiproc.programs import failures, planes, sums
from tests.multiproc.programs.job import Job

NETWORK = "10.77.0"
JOB_S = 150.0


class Machine:
    def __init__(self, folder: Path, number: int, port: int, env: dict[str, str]) -> None:
        self.folder = folder / f"job{port}"
        self.folder.mkdir()
        self.number = number
        self.env = {
            **clean_environment(self.folder),
            # The other guest has the same secret.
            "BYTEPS_SECRET": "the secret of two guests",
            "DMLC_ENABLE_RDMA": "ibverbs",
            "DMLC_PS_ROOT_URI": f"{NETWORK}.1",
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NODE_HOST": f"{NETWORK}.{number}",
            "DMLC_NUM_WORKER": "2",
            "DMLC_NUM_SERVER": "2",
            # The other guest may be much later, because it shares the same two cores.
            "BYTEPS_START_TIMEOUT_S": "90",
            "RANK": str(number - 1),
            "WORLD_SIZE": "2",
            # Each machine has one rank. The programs expect the values of one machine with two.
            "LOCAL_RANK": str(number - 1),
            "LOCAL_WORLD_SIZE": "2",
            **env,
        }
        roles = ["scheduler", "server"] if number == 1 else ["server"]
        command = [server_executable(), "--role"]
        self.nodes = [Spawned(role, [*command, role], self.env, self.folder) for role in roles]

    def start_worker(self, program: Callable[[Job], None], **args: object) -> int:
        """Start a worker and get its pid."""
        pid = os.fork()
        if pid != 0:
            return pid
        log = os.open(self.folder / "worker.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(self.env)
        sys.exit(Job(self.folder, args).run(program))


def ended(pid: int, timeout_s: float = JOB_S) -> int:
    """Get the exit status of a process. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    raise TimeoutError(f"the worker still runs after {timeout_s:g} s")


def good_jobs(folder: Path, number: int) -> None:
    """Run jobs for planes and for sums between machines."""
    parts = {"BYTEPS_PARTITION_BYTES": "8192"}
    for port, program, args in (
        (9001, planes.apart, {"servers": 2, "data_plane": True, "endpoints": 1}),
        (9002, sums.every_dtype, {"partition_bytes": 8192, "dtypes": ["float32", "bfloat16"]}),
    ):
        machine = Machine(folder, number, port, parts if program is sums.every_dtype else {})
        status = ended(machine.start_worker(program, **args))
        assert status == 0, f"{program.__name__}: {(machine.folder / 'worker.log').read_text()}"
        for node in machine.nodes:
            assert node.wait(30) == 0, node.text


def until(job: Job, begin: int, holds: Callable[[str], bool]) -> None:
    """Sum until a condition holds for the logs of both workers from here on."""
    log = job.folder / "worker.log"
    while True:
        values = torch.full((100_000,), job.rank + 1.0)
        values[0] = holds(log.read_text()[begin:])
        bps.push_pull_inplace(values, average=False, name="until")
        assert bool((values[1:] == 3.0).all()), "a sum is wrong"
        if values[0] == 2:
            return


def has_left(log: str) -> int:
    """Count the connections that have left the second cable."""
    return len(re.findall(r"\(10\.77\.\S+ to 10\.77\.\S+ broke, and was made again", log))


def is_back(log: str) -> bool:
    """Tell whether all of these connections use the cable again."""
    return len(re.findall(r"data for server \d goes from 10\.78\..* again", log)) >= has_left(log)


def loses_a_path(job: Job) -> None:
    """Drop frames on the second cable, and later send them to a NIC that does not exist.

    The link stays up.
    """
    other = ["10.78.0.2", "10.78.0.1"][job.rank]
    drop = ["tc", "qdisc", "replace", "dev", "eth1", "root"]
    neighbor = ["ip", "neigh", "replace", other, "dev", "eth1", "lladdr"]
    bps.init()
    bps.push_pull(torch.ones(100_000), name="first")
    for fails, works in (
        ([*drop, "blackhole"], [*drop, "pfifo_fast"]),
        (
            [*neighbor, "52:54:00:77:ff:ff", "nud", "permanent"],
            [*neighbor, f"52:54:00:77:01:{2 - job.rank:02x}", "nud", "reachable"],
        ),
    ):
        begin = len((job.folder / "worker.log").read_text())
        subprocess.run(fails, check=True)
        until(job, begin, lambda log: has_left(log) > 0)
        subprocess.run(works, check=True)
        until(job, begin, is_back)
    bps.shutdown()


def silent_path(folder: Path, number: int) -> None:
    nics = {"BYTEPS_NICS": "rxe0,rxe1", "BYTEPS_PARTITION_BYTES": "65536"}
    machine = Machine(folder, number, 9004, nics)
    status = ended(machine.start_worker(loses_a_path))
    assert status == 0, (machine.folder / "worker.log").read_text()
    for node in machine.nodes:
        assert node.wait(30) == 0, node.text


def die() -> None:
    """Reset the machine, like a power failure."""
    Path("/proc/sys/kernel/sysrq").write_text("1")
    Path("/proc/sysrq-trigger").write_text("b")


def bad_job(folder: Path, number: int) -> None:
    machine = Machine(folder, number, 9003, {"BYTEPS_PEER_TIMEOUT_S": "6"})
    worker = machine.start_worker(failures.loop)
    deadline = time.monotonic() + JOB_S
    while not (machine.folder / f"mark.looping.{number - 1}").exists():
        assert time.monotonic() < deadline, (machine.folder / "worker.log").read_text()
        time.sleep(0.05)
    if number == 2:
        time.sleep(1.0)
        die()
    assert ended(worker, 60) == 1
    for node in machine.nodes:
        assert node.wait(30) == 1, node.text


def main(arguments: list[str]) -> int:
    folder, number = Path(arguments[0]), int(arguments[1])
    good_jobs(folder, number)
    silent_path(folder, number)
    bad_job(folder, number)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
