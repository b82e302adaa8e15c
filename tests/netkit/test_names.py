"""Host names that resolve late, change their address or do not resolve; hosts without IPv4."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench.kit.emulation import Emulation, Host
from bench.kit.plan import Topology
from tests import native
from tests.native import LIMIT_S, SumJob

pytestmark = pytest.mark.requires("root")

NAME = "scheduler.invalid"
"""Never resolves: RFC 2606."""
IPV6 = {f"net.ipv6.conf.{which}.disable_ipv6": "0" for which in ("all", "default", "lo", "eth0")}


@pytest.fixture(scope="module")
def programs() -> Path:
    return native.build("byteps-server", "sum_worker")


class Job(SumJob):
    """A job with a server and a worker."""

    def __init__(self, programs: Path, folder: Path) -> None:
        super().__init__(programs, folder)
        self.hosts = folder / "hosts"
        """Hosts file that the processes see as /etc/hosts."""
        self.know()
        self.env = {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(folder),
            "BYTEPS_SECRET": secrets.token_hex(32),
            "DMLC_PS_ROOT_PORT": "0",
            "DMLC_NUM_WORKER": "1",
            "DMLC_NUM_SERVER": "1",
            "RANK": "0",
            "WORLD_SIZE": "1",
        }

    def know(self, address: str = "") -> None:
        """Map the name to this address from now on."""
        self.hosts.write_text("127.0.0.1 localhost\n" + (f"{address} {NAME}\n" if address else ""))

    def with_hosts(self, command: Sequence[str]) -> list[str]:
        bind = 'mount --bind "$0" /etc/hosts && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", bind, str(self.hosts), *command]

    def start_scheduler(self, host: str, wrap: Sequence[str] = ()) -> None:
        self.env["DMLC_PS_ROOT_URI"] = host
        port_file = self._folder / "scheduler.port"
        command = [*self.server_command("scheduler"), "--port-file", str(port_file)]
        self.spawn("scheduler", [*wrap, *self.with_hosts(command)], self.env)
        deadline = time.monotonic() + LIMIT_S
        while not port_file.exists():
            self.demand_running()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.env["DMLC_PS_ROOT_PORT"] = port_file.read_text().split()[1]

    def start_server(self, wrap: Sequence[str] = ()) -> None:
        command = self.with_hosts(self.server_command("server"))
        self.spawn("server", [*wrap, *command], self.env)

    def start_worker(self, wrap: Sequence[str] = ()) -> None:
        command = self.with_hosts(self.worker_command(3))
        self.spawn("worker", [*wrap, *command], self.env)

    def wait_for_text(self, title: str, text: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while text not in self.processes[title].text:
            self.demand_running()
            assert time.monotonic() < deadline, self.processes[title].text
            time.sleep(0.02)


@pytest.fixture
def job(programs: Path, run_dir: Path) -> Iterator[Job]:
    made = Job(programs, run_dir)
    yield made
    made.kill()


def test_nodes_wait_for_a_name_and_follow_it(job: Job) -> None:
    job.start_scheduler("127.0.0.1")
    job.env["DMLC_PS_ROOT_URI"] = NAME
    job.start_server()
    job.wait_for_text("server", "waiting: the scheduler's address (DMLC_PS_ROOT_URI) is not known")
    job.know("127.0.0.3")  # nothing listens there
    job.wait_for_text("server", "listening: server")
    job.start_worker()
    job.know("127.0.0.1")
    job.finish()


def test_a_scheduler_waits_for_its_name(job: Job) -> None:
    """The name first has another address, like the address of a deleted pod."""
    job.know("192.0.2.1")
    job.env["DMLC_PS_ROOT_URI"] = NAME
    job.spawn("early", job.with_hosts(job.server_command("scheduler")), job.env)
    job.wait_for_text("early", "this machine has no address 192.0.2.1")
    job.know("127.0.0.1")
    job.wait_for_text("early", "listening: scheduler")


def test_a_name_that_never_is_known_is_named(job: Job) -> None:
    job.env |= {"DMLC_PS_ROOT_URI": NAME, "BYTEPS_START_TIMEOUT_S": "0.5"}
    job.env["DMLC_PS_ROOT_PORT"] = "9"
    job.start_server()
    server = job.processes["server"]
    assert server.wait(LIMIT_S) == 1
    assert f"the host '{NAME}' does not resolve" in server.text
    assert "this was so for 0.5 s (BYTEPS_START_TIMEOUT_S=0.5)" in server.text


def test_a_name_that_is_loopback_is_no_address_for_others(job: Job) -> None:
    """Debian's /etc/hosts maps a machine's own name this way."""
    job.know("127.0.1.1")
    job.start_scheduler(NAME)
    job.start_server()
    error = f"{NAME} is 127.0.1.1 here: nodes on other machines cannot reach this one"
    for node in ("scheduler", "server"):
        job.wait_for_text(node, error)
    job.start_worker()  # on this machine
    job.finish()


def remove_ipv4(host: Host, address: str) -> None:
    assert host.namespace is not None
    sysctl = ["sysctl", "-q", "-w", *(f"{name}={value}" for name, value in IPV6.items())]
    for command in (
        sysctl,
        ["ip", "addr", "flush", "dev", "eth0"],
        ["ip", "-4", "addr", "flush", "dev", "lo"],
        ["ip", "addr", "add", f"{address}/64", "dev", "eth0", "nodad"],
        ["ip", "addr", "replace", "::1/128", "dev", "lo"],
    ):
        subprocess.run(host.command(command), check=True, timeout=60)


def test_a_job_on_hosts_with_ipv6_alone(job: Job) -> None:
    topology = Topology(workers=1, servers=1, emulated_hosts=2, link_bits=100_000_000)
    with Emulation(topology) as emulation:
        near, far = emulation.hosts
        remove_ipv4(near, "fd00::1")
        remove_ipv4(far, "fd00::2")
        job.env |= {"BYTEPS_STATUS_PORT": "9001", "BYTEPS_METRICS_PORT": "9400"}
        job.start_scheduler("fd00::1", near.command([]))
        job.start_server(near.command([]))
        job.start_worker(far.command([]))
        job.finish()
