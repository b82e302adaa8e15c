"""Hosts with two NICs: both carry data, and a job survives the failure of a NIC."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench.kit.emulation import Emulation, Host
from bench.kit.plan import Topology
from tests import native
from tests.native import BYTES, LIMIT_S, SumJob

pytestmark = pytest.mark.requires("root")

WORKERS, SERVERS = 2, 2
RATE = 400_000_000
STATUS = str(native.REPOSITORY / "scripts/status.sh")
STATUS_PORT, METRICS_PORT = 9001, 9400
METRICS = f"http://127.0.0.1:{METRICS_PORT}/metrics"


@pytest.fixture(scope="module")
def programs() -> Path:
    return native.build("byteps-server", "sum_worker")


class Job(SumJob):
    """A job that checks every sum; worker 0 shares a host with the scheduler."""

    def __init__(self, programs: Path, emulation: Emulation, folder: Path) -> None:
        super().__init__(programs, folder)
        self.emulation = emulation
        self._env = {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(folder),
            "BYTEPS_SECRET": secrets.token_hex(32),
            "BYTEPS_NICS": "eth0,eth1",
            "BYTEPS_PARTITION_BYTES": "65536",
            "DMLC_PS_ROOT_URI": emulation.hosts[0].address,
            "DMLC_PS_ROOT_PORT": "0",
            "BYTEPS_STATUS_PORT": str(STATUS_PORT),
            "DMLC_NUM_WORKER": str(WORKERS),
            "DMLC_NUM_SERVER": str(SERVERS),
        }
        self._wrapper: list[str] = []

    def start(self, rounds: int, env: dict[str, str] | None = None) -> None:
        self._env |= env or {}
        hosts = self.emulation.hosts
        port_file = self._folder / "scheduler.port"
        scheduler = self.server_command("scheduler")
        self._spawn_on(hosts[0], "scheduler", [*scheduler, "--port-file", str(port_file)])
        deadline = time.monotonic() + LIMIT_S
        while not port_file.exists():
            assert self.processes["scheduler"].running and time.monotonic() < deadline
            time.sleep(0.01)
        self._env["DMLC_PS_ROOT_PORT"] = port_file.read_text().split()[1]
        for index in range(SERVERS):
            server = self.server_command("server")
            self._spawn_on(hosts[WORKERS + index], f"server {index}", server)
        for rank in range(WORKERS):
            self._env |= {"RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
            self._spawn_on(hosts[rank], f"worker {rank}", self.worker_command(rounds))

    def _spawn_on(self, host: Host, title: str, command: list[str]) -> None:
        self.spawn(title, host.command([*self._wrapper, *command]), self._env)

    def pretend_numa_nodes(self, cores: Sequence[int]) -> None:
        """Show each host a NUMA node for each of these cores, with its NIC i on node i.

        Only processes that start afterwards see this.
        """
        nodes, nics = self._folder / "node", self._folder / "net"
        for index, core in enumerate(cores):
            (nodes / f"node{index}").mkdir(parents=True)
            (nodes / f"node{index}/cpulist").write_text(f"{core}\n")
            (nics / f"eth{index}/device").mkdir(parents=True)
            (nics / f"eth{index}/device/numa_node").write_text(f"{index}\n")
        # `ip netns exec` gives every process its own mounts.
        mounts = f"mount --bind {nodes} /sys/devices/system/node"
        mounts += f" && mount --bind {nics} /sys/class/net"
        self._wrapper = ["sh", "-ec", f'{mounts}; exec "$@"', "sh"]

    def await_text(self, title: str, pattern: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not re.search(pattern, self.processes[title].text):
            assert time.monotonic() < deadline, f"no {pattern!r}: {self.processes[title].text}"
            assert self.processes[title].running, self.processes[title].text
            time.sleep(0.05)

    def await_traffic(self, index: int, rail: int, more: int = 4 * BYTES) -> None:
        """Wait until a NIC has sent this many more bytes."""
        target = self.emulation.sent_bytes(index)[rail] + more
        deadline = time.monotonic() + LIMIT_S
        while self.emulation.sent_bytes(index)[rail] < target:
            assert time.monotonic() < deadline, f"NIC {rail} of host {index} stands still"
            self.demand_running()
            time.sleep(0.05)


def _output(host: Host, *command: str) -> str:
    """Run a command on an emulated host and get its output."""
    env = {"PATH": os.environ["PATH"], "BYTEPS_STATUS_PORT": str(STATUS_PORT)}
    done = subprocess.run(
        host.command(command), env=env, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def _by_nic(job: Job) -> list[dict[str, int]]:
    """Get the bytes that each node has sent by each NIC from the status: servers, then workers."""
    status = json.loads(_output(job.emulation.hosts[0], STATUS, "--json"))
    return [{nic["nic"]: nic["sent_bytes"] for nic in node["by_nic"]} for node in status["nodes"]]


@pytest.fixture
def job(programs: Path, tmp_path: Path) -> Iterator[Job]:
    topology = Topology(
        workers=WORKERS,
        servers=SERVERS,
        emulated_hosts=WORKERS + SERVERS,
        link_bits=RATE,
        nics_per_host=2,
    )
    with Emulation(topology) as emulation:
        made = Job(programs, emulation, tmp_path)
        try:
            yield made
        finally:
            made.kill()


def test_both_nics_carry_the_data(job: Job) -> None:
    job.start(rounds=60)
    job.finish()
    for index in range(WORKERS + SERVERS):
        first, two = job.emulation.sent_bytes(index)
        assert 0.6 < first / two < 1.7, f"host {index} sent {first} and {two} bytes"


def test_bytes_follow_the_rates_of_the_nics(job: Job) -> None:
    """The kernel reports no rates, so that the NICs' rates are measured."""
    for index in range(WORKERS + SERVERS):
        job.emulation.set_rate(index, 1, RATE // 10)
    job.start(rounds=60)
    job.finish()
    for index in range(WORKERS + SERVERS):
        fast, slow = job.emulation.sent_bytes(index)
        assert 0 < 2 * slow < fast, f"host {index} sent {fast} and {slow} bytes"


def test_status_and_metrics_tell_what_each_nic_carries(job: Job) -> None:
    """Status and metrics report half of the bytes for each NIC, and as many as the kernel
    counted."""
    # Heartbeats every half second.
    quick = {"BYTEPS_PEER_TIMEOUT_S": "3", "BYTEPS_METRICS_PORT": str(METRICS_PORT)}
    job.start(rounds=100_000, env=quick)
    nodes = [*range(WORKERS, WORKERS + SERVERS), *range(WORKERS)]
    deadline = time.monotonic() + LIMIT_S
    while True:
        least = [job.emulation.sent_bytes(index) for index in nodes]
        sent = _by_nic(job)
        most = [job.emulation.sent_bytes(index) for index in nodes]
        known = [nic_bytes.get("eth0", 0) + nic_bytes.get("eth1", 0) for nic_bytes in sent]
        # A record is half a second old, or older if the machine is busy.
        recent = all(
            low[rail] / 2 <= nic_bytes.get(f"eth{rail}", 0)
            for nic_bytes, low in zip(sent, least, strict=False)
            for rail in range(2)
        )
        if len(known) == len(nodes) and min(known) > 160 * BYTES and recent:
            break
        assert time.monotonic() < deadline, sent
        job.demand_running()
        time.sleep(0.1)
    for nic_bytes, low, high in zip(sent, least, most, strict=True):
        assert 0.6 < nic_bytes["eth0"] / nic_bytes["eth1"] < 1.7, sent
        for rail in range(2):
            assert low[rail] / 2 <= nic_bytes[f"eth{rail}"] <= high[rail], (sent, least, most)
    table = _output(job.emulation.hosts[0], STATUS)
    for node in ("server 0", "server 1", "worker 0", "worker 1"):
        for nic in ("eth0", "eth1"):
            assert re.search(rf"^{node} +{nic} +\S+ MB/s +\S+ MB ", table, re.MULTILINE), table
    code = f"import urllib.request as u; print(u.urlopen('{METRICS}').read().decode())"
    text = _output(job.emulation.hosts[WORKERS], sys.executable, "-c", code)
    for what in ("sent", "received"):
        name = f"byteps_nic_{what}_bytes_total"
        nic_metrics = dict(re.findall(rf'^{name}{{.*nic="(\w+)"}} (\d+)$', text, re.MULTILINE))
        assert 0.6 < int(nic_metrics["eth0"]) / int(nic_metrics["eth1"]) < 1.7, text


def _threads(pid: int) -> dict[str, list[int]]:
    """Get the allowed cores of a process's I/O threads."""
    affinities = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("bps-tcp-"):
            affinities[name] = sorted(os.sched_getaffinity(int(task.name)))
    return affinities


def test_threads_run_on_the_numa_node_of_their_nic(job: Job) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    cores = [allowed[0], allowed[-1]]
    job.pretend_numa_nodes(cores)
    job.start(rounds=100_000, env={"BYTEPS_IO_THREADS": "2", "BYTEPS_LOG_LEVEL": "DEBUG"})
    for index in range(WORKERS + SERVERS):
        for rail in range(2):
            job.await_traffic(index, rail)
    for title, process in job.processes.items():
        threads = _threads(process.pid)
        if title == "scheduler":  # the scheduler carries no gradients
            assert threads == {"bps-tcp-0": allowed, "bps-tcp-1": allowed}
            continue
        assert threads == {"bps-tcp-0": [cores[0]], "bps-tcp-1": [cores[1]]}, title
        for rail in range(2):
            assert f"1 I/O threads on NUMA node {rail} serve eth{rail}" in process.text
    job.demand_running()


@pytest.mark.parametrize("host", [1, WORKERS], ids=["worker", "server"])
@pytest.mark.parametrize("how", ["down", "cut"])
def test_a_nic_fails_and_comes_back(job: Job, host: int, how: str) -> None:
    """Connections move to the other NIC and return; every sum is right."""
    job.start(rounds=100_000)
    for rail in range(2):
        job.await_traffic(host, rail)
    _break(job, host, 1, how)
    job.await_text("worker 1", r"made again after")
    job.await_traffic(host, 0)
    _mend(job, host, 1, how)
    job.await_text("worker 1", r"goes from .* again")
    job.await_traffic(host, 1)
    job.demand_running()


def test_the_nic_that_leads_to_the_scheduler_fails(job: Job) -> None:
    job.start(rounds=100_000)
    for rail in range(2):
        job.await_traffic(1, rail)
    _break(job, 1, 0, "down")
    job.await_text("worker 1", r"with the scheduler \(.*made again after")
    job.await_traffic(1, 1)
    _mend(job, 1, 0, "down")
    job.await_traffic(1, 0)
    job.demand_running()


def _break(job: Job, host: int, rail: int, how: str) -> None:
    if how == "down":
        job.emulation.set_link(host, rail, up=False)
    else:
        job.emulation.cut_link(host, rail, cut=True)


def _mend(job: Job, host: int, rail: int, how: str) -> None:
    if how == "down":
        job.emulation.set_link(host, rail, up=True)
    else:
        job.emulation.cut_link(host, rail, cut=False)
