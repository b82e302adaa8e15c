"""Hosts with two RDMA devices: both carry the data, and a job outlives the link of one."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.ports import free_ports
from tests import native
from tests.rdma.transports import make
from tests.sum_job import BYTES, LIMIT_S, SumJob

pytestmark = pytest.mark.on_rdma

RDMA = make("rdma")
WORKERS, SERVERS = 2, 1
MORE = 8 * BYTES
FIRST, SECOND = "rdma0", "rdma2"
SECOND_PEER = "rdma3"
STATUS = str(native.REPOSITORY / "scripts/status.sh")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=60)


@pytest.fixture
def second_nic() -> Iterator[None]:
    """rxe1 over SECOND, next to the guest's own rxe0 over FIRST."""
    if not Path(f"/sys/class/net/{FIRST}").exists():
        pytest.skip("for the guest of these tests, where a device can be added")
    _ip("link", "add", SECOND, "type", "veth", "peer", "name", SECOND_PEER)
    try:
        for name in (SECOND_PEER, SECOND):
            _ip("link", "set", name, "mtu", "4200", "up")
        _ip("addr", "add", "10.78.0.1/24", "dev", SECOND)
        link = ["rdma", "link", "add", "rxe1", "type", "rxe", "netdev", SECOND]
        subprocess.run(link, check=True, timeout=60)
        yield
    finally:
        _ip("link", "del", SECOND)  # and the device above it


class Job(SumJob):
    """Two workers and a server."""

    def __init__(self, folder: Path) -> None:
        super().__init__(native.FOLDER, folder)
        self._status_port = str(free_ports())

    def start(self, nics: str, rounds: int) -> None:
        env = {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(self._folder),
            "BYTEPS_SECRET": secrets.token_hex(32),
            "BYTEPS_NICS": nics,
            "BYTEPS_PARTITION_BYTES": "65536",
            "BYTEPS_PEER_TIMEOUT_S": "30",
            "BYTEPS_STATUS_PORT": self._status_port,
            "DMLC_PS_ROOT_URI": RDMA.host,
            "DMLC_PS_ROOT_PORT": str(free_ports()),
            "DMLC_NUM_WORKER": str(WORKERS),
            "DMLC_NUM_SERVER": str(SERVERS),
            **RDMA.env,
        }
        self.spawn("scheduler", self.server_command("scheduler"), env)
        self.spawn("server 0", self.server_command("server"), env)
        for rank in range(WORKERS):
            place = {"RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
            self.spawn(f"worker {rank}", self.worker_command(rounds), {**env, **place})

    def sent(self) -> list[dict[str, int]]:
        """Bytes that each node has sent by each NIC; empty while the status tells of none."""
        done = subprocess.run(
            [STATUS, "--json"],
            env={"PATH": os.environ["PATH"], "BYTEPS_STATUS_PORT": self._status_port},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        nodes = json.loads(done.stdout)["nodes"] if done.returncode == 0 else []
        return [{nic["nic"]: nic["sent_bytes"] for nic in node["by_nic"]} for node in nodes]

    def await_traffic(self, nic: str, more: int = MORE) -> None:
        """Until each node has sent so many more bytes by a NIC."""
        deadline = time.monotonic() + LIMIT_S
        begin: list[dict[str, int]] = []
        while True:
            now = self.sent()
            if len(now) == WORKERS + SERVERS and not begin:
                begin = now
            if begin and all(
                b.get(nic, 0) - a.get(nic, 0) >= more for a, b in zip(begin, now, strict=True)
            ):
                return
            self.demand_running()
            assert time.monotonic() < deadline, f"{nic} stands still: {now}"
            time.sleep(0.2)

    def await_text(self, title: str, pattern: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not re.search(pattern, self.processes[title].text):
            self.demand_running()
            assert time.monotonic() < deadline, f"no {pattern!r}: {self.processes[title].text}"
            time.sleep(0.05)


@pytest.fixture
def job(second_nic: None, run_dir: Path) -> Iterator[Job]:
    made = Job(run_dir)
    yield made
    made.kill()


def test_both_devices_carry_the_data(job: Job) -> None:
    job.start("rxe0,rxe1", rounds=100_000)
    for nic in (FIRST, SECOND):
        job.await_traffic(nic)
    text = job.processes["scheduler"].text
    assert len(re.findall(r"joined: .* on 2 NICs", text)) == WORKERS + SERVERS, text
    job.demand_running()


def test_a_job_with_two_devices_ends_well(job: Job) -> None:
    job.start(f"{FIRST},{SECOND}", rounds=30)
    job.finish()


def test_one_device_is_named(job: Job) -> None:
    """It alone carries data; the address that nodes have is the other one's."""
    job.start("rxe1", rounds=100_000)
    job.await_traffic(SECOND)
    for node in job.sent():
        assert node.get(FIRST, 0) < node[SECOND] / 8, node
    job.demand_running()


def test_a_link_goes_down_and_comes_back(job: Job) -> None:
    """What was in flight goes by the other device, and back; every sum is right."""
    job.start("rxe0,rxe1", rounds=100_000)
    for nic in (FIRST, SECOND):
        job.await_traffic(nic)
    _ip("link", "set", SECOND_PEER, "down")
    for rank in range(WORKERS):
        job.await_text(f"worker {rank}", r"the data connection \d with server 0.* made again after")
    job.await_traffic(FIRST)  # the last report was made before, while both carried data
    before = job.sent()
    job.await_traffic(FIRST)
    for then, now in zip(before, job.sent(), strict=True):
        assert now[SECOND] - then[SECOND] < MORE, "the link is down"
    _ip("link", "set", SECOND_PEER, "up")
    for rank in range(WORKERS):
        job.await_text(f"worker {rank}", r"data for server 0 goes from .* again")
    job.await_traffic(SECOND)
    job.demand_running()
