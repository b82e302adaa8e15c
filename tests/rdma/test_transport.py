"""Requirements of a transport: sums, planes, losses, several NICs.

Tests over TCP are in tests/multiproc. This file has those over RDMA, and those that no other file
has.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.children import captured, free_ports
from tests import native
from tests.multiproc.cluster import END_S, Cluster, wait_all
from tests.multiproc.endings import (
    COPIES,
    RETURNS,
    WAIT,
    await_copies,
    demand_error,
    demand_failed,
    replace_scheduler,
    start_looping,
    start_with_spare,
    wait_done,
)
from tests.native import BYTES, LIMIT_S, SumJob
from tests.rdma.transports import ADDRESS_VARIABLE, VARIANTS, Transport, make

PAGE = 4096
INLINE = 1024
PATIENCE = {"BYTEPS_OP_TIMEOUT_S": "60"}
ROUNDS = 300
"""Rounds: enough that a leaked registration, file or tensor per round is far above the
tolerance."""

over_rdma = pytest.mark.transports("rdma")
each_variant = pytest.mark.transports(*VARIANTS)

Make = Callable[..., Cluster]


@each_variant
def test_sizes_around_the_limits(make_over: Make) -> None:
    """Sizes near the limits of a small message and of a partition."""
    env = {"BYTEPS_PARTITION_BYTES": str(2 * PAGE), "BYTEPS_RDMA_INLINE_BYTES": str(INLINE)}
    around = [*range(INLINE - 4, INLINE + 5), *range(INLINE - 400, INLINE, 37)]
    counts = [1, 2, 3, 63, 64, 65, *around, PAGE - 1, PAGE, PAGE + 1]
    counts += [2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 20 * PAGE + 5]
    make_over(workers=2, servers=2, env={**env, **PATIENCE}).run("planes:sizes", counts=counts)


@pytest.mark.transports("tcp", "rdma", "rdma-one-plane", "rdma-shallow")
def test_many_in_flight(make_over: Make) -> None:
    """More messages than any queue holds, in both directions at once."""
    env = {"BYTEPS_PARTITION_BYTES": str(PAGE), "BYTEPS_SERVER_WINDOW_BYTES": "1000000000"}
    make_over(workers=2, servers=2, env={**env, **PATIENCE}).run("planes:many", count=150)


@over_rdma
def test_several_peers(make_over: Make) -> None:
    env = {"BYTEPS_PARTITION_BYTES": str(PAGE)}
    make_over(workers=4, servers=3, env={**env, **PATIENCE}).run("planes:many", count=60)


@over_rdma
def test_every_dtype_and_size(make_over: Make) -> None:
    env = {"BYTEPS_PARTITION_BYTES": str(PAGE)}
    cluster = make_over(workers=2, servers=2, env={**env, **PATIENCE})
    cluster.run("sums:every_dtype", partition_bytes=PAGE)


@pytest.mark.transports("rdma", "rdma-3-endpoints")
def test_large_tensors(make_over: Make) -> None:
    make_over(workers=2, servers=2, env=PATIENCE).run("sums:large")


@over_rdma
def test_wire_types(make_over: Make) -> None:
    env = {"BYTEPS_PARTITION_BYTES": str(PAGE)}
    make_over(workers=2, servers=2, env={**env, **PATIENCE}).run("sums:wire")


@over_rdma
def test_few_bits(make_over: Make) -> None:
    """Sums match a reference that does not depend on the transport, to the bit."""
    env = {**PATIENCE, "BYTEPS_DETERMINISTIC": "1"}
    make_over(workers=3, servers=2, env=env).run("few_bits:sums")


@over_rdma
def test_groups(make_over: Make) -> None:
    make_over(workers=4, servers=2, env=PATIENCE).run("sums:disjoint")


@over_rdma
def test_leaving_and_coming_back(make_over: Make) -> None:
    make_over(workers=2, servers=1, env=PATIENCE).run("lifecycle:two_lives")


@pytest.mark.transports("tcp", "rdma", "rdma-one-plane", "rdma-no-pool")
def test_many_rounds_leave_nothing(make_over: Make, transport: Transport) -> None:
    """Workers leak no registration, file or memory. Servers are watched from outside."""
    cluster = make_over(workers=2, servers=1, env=PATIENCE)
    cluster.run("planes:rounds", rdma=transport.is_rdma, rounds=ROUNDS, timeout_s=600)


# Data uses data endpoints and control uses control endpoints, by the endpoints' own counters.


@pytest.mark.transports("rdma", "rdma-one-plane", "rdma-3-endpoints", "rdma-ipv6")
def test_each_message_goes_by_its_plane(make_over: Make, transport: Transport) -> None:
    cluster = make_over(workers=2, servers=2)
    cluster.run(
        "planes:apart",
        servers=2,
        data_plane=transport.has_data_plane,
        endpoints=int(transport.env.get("BYTEPS_CONNECTIONS", "1")),
    )


@pytest.mark.transports("rdma")
def test_heartbeats_go_by_control(make_over: Make) -> None:
    cluster = make_over(workers=2, servers=1, env={"BYTEPS_PEER_TIMEOUT_S": "6"})
    cluster.start("planes:beats")
    cluster.wait_mark("idle", range(2))
    time.sleep(4.0)  # several heartbeats
    cluster.go("on")
    cluster.finish()


@pytest.mark.transports("rdma")
def test_memory_in_the_cache_is_registered_once(make_over: Make) -> None:
    env = {"BYTEPS_PARTITION_BYTES": "65536", "BYTEPS_MIN_PARTITION_BYTES": "65536"}
    make_over(workers=2, servers=2, env=env).run("planes:once")


@pytest.mark.transports("rdma")
@pytest.mark.parametrize("budget", [1 << 20, 512 << 20])
def test_slots_of_all_workers_fit_into_their_memory(make_over: Make, budget: int) -> None:
    """The share of a server that each worker gets decreases with the number of workers."""
    cluster = make_over(workers=3, servers=1, env={"BYTEPS_RDMA_SLOT_BYTES": str(budget)})
    cluster.start("planes:small")
    cluster.wait_mark("summed", range(3))
    (server,) = cluster.servers
    status = Path(f"/proc/{server.pid}/status").read_text()
    match = re.search(r"VmPin:\s+(\d+) kB", status)
    assert match is not None, status
    # An endpoint with the scheduler, and a control and a data endpoint with each worker.
    endpoints, slot, wanted = 1 + 3 * 2, 1024 + 4096, 64 + 128
    slots = min(wanted, budget // endpoints // 4096 * 4096 // slot)
    each = (64 * slots // wanted + 128 * slots // wanted) * slot
    in_pages = -(-each // 4096) * 4096
    assert int(match[1]) * 1024 == endpoints * in_pages <= budget
    cluster.go("on")
    cluster.finish()


# After the loss of a peer, every process ends in time with an error that names the peer, or the
# peer is replaced.


PEER_TIMEOUT_S = 4
SHORT = {
    "BYTEPS_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S),
    "BYTEPS_START_TIMEOUT_S": "10",
    "BYTEPS_PARTITION_BYTES": "4096",
}

each_way = pytest.mark.transports("rdma", "rdma-one-plane")
signals = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])


@each_way
@signals
def test_worker(make_over: Make, number: signal.Signals) -> None:
    cluster = start_looping(make_over, SHORT, workers=3, servers=2)
    cluster.workers["worker 1"].send(number)
    survivors = [cluster.workers["worker 0"], cluster.workers["worker 2"]]
    nodes = [*cluster.servers, cluster.scheduler]
    wait_all([*survivors, *nodes], END_S)
    for worker in survivors:
        demand_error(worker, r"worker 1\b.*lost")
    for node in nodes:
        demand_failed(node, r"worker 1\b.*lost")


@each_way
@signals
def test_server(make_over: Make, number: signal.Signals) -> None:
    cluster = start_looping(make_over, SHORT, workers=2, servers=2)
    cluster.servers[1].send(number)
    survivors = list(cluster.workers.values())
    wait_all([*survivors, cluster.servers[0], cluster.scheduler], END_S)
    for worker in survivors:
        demand_error(worker, r"server [01]\b.*lost")
    for node in (cluster.servers[0], cluster.scheduler):
        demand_failed(node, r"server [01]\b.*lost")


@pytest.mark.transports("tcp", "rdma")
def test_a_server_listens_where_it_is_told(make_over: Make, transport: Transport) -> None:
    port = free_ports(host=transport.host)
    cluster = start_looping(
        make_over, {**SHORT, "BYTEPS_NODE_PORT": str(port)}, workers=1, servers=1
    )
    cluster.servers[0].send(signal.SIGKILL)
    (worker,) = cluster.workers.values()
    wait_all([worker, cluster.scheduler], END_S)
    demand_error(worker, rf"server 0 \({re.escape(transport.host)}:{port}\).*lost")


@each_way
@signals
def test_scheduler(make_over: Make, number: signal.Signals) -> None:
    cluster = start_looping(make_over, SHORT, workers=2, servers=1)
    cluster.scheduler.send(number)
    survivors = list(cluster.workers.values())
    wait_all([*survivors, *cluster.servers], END_S)
    for worker in survivors:
        demand_error(worker, r"scheduler\b.*lost")
    for server in cluster.servers:
        demand_failed(server, r"scheduler\b.*lost")


@each_way
def test_a_missing_scheduler_is_an_error_over_rdma(make_over: Make) -> None:
    cluster = make_over(workers=1, servers=1, env={**SHORT, "BYTEPS_START_TIMEOUT_S": "3"})
    cluster.port = 9
    worker = cluster.start_worker(0, "failures:init_only")
    server = cluster.start_server()
    wait_all([worker, server], END_S)
    demand_error(worker, r"scheduler.*did not answer.*BYTEPS_START_TIMEOUT_S=3")
    demand_failed(server, r"scheduler.*did not answer.*BYTEPS_START_TIMEOUT_S=3")


@pytest.mark.transports("rdma")
def test_a_lost_server_is_replaced(make_over: Make) -> None:
    cluster = make_over(workers=2, servers=2, env=WAIT)
    training = start_with_spare(cluster, steps=20, pace=0.03)
    wait_done(cluster, 5)
    cluster.servers[0].send(signal.SIGKILL)
    cluster.finish_with(training, [cluster.servers[0]])


@pytest.mark.transports("rdma")
def test_a_lost_servers_state_is_copied(make_over: Make) -> None:
    cluster = make_over(workers=2, servers=2, env=COPIES)
    training = cluster.start("lost_servers:with_copies", steps=60, pace=0.03)
    await_copies(cluster)
    cluster.servers[0].send(signal.SIGKILL)
    cluster.finish_with(training, [cluster.servers[0]])


@pytest.mark.transports("rdma")
def test_a_lost_scheduler_is_replaced(make_over: Make) -> None:
    """The scheduler is lost twice."""
    cluster = make_over(workers=2, servers=2, env=RETURNS)
    cluster.start("lost_servers:train", steps=40, holds=[5, 15, 20, 30])
    replace_scheduler(cluster, 1, 5)
    replace_scheduler(cluster, 2, 20)
    cluster.finish()


# The contract of a link over RDMA; tests/unit/test_parts.py covers TCP.


CONTRACT_LIMIT_S = 400


@pytest.mark.transports("rdma")
def test_contract(transport: Transport, run_dir: Path) -> None:
    folder = native.FOLDER if ADDRESS_VARIABLE in os.environ else native.build("connection_test")
    log = run_dir / "contract.log"
    with log.open("wb") as out:
        ended = subprocess.run(
            [folder / "connection_test", "--gtest_filter=*Contract.*/Rdma"],
            env={**os.environ, **transport.env, "CONTRACT_RDMA_ADDRESS": transport.host},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=CONTRACT_LIMIT_S,
            check=False,
        )
    assert ended.returncode == 0
    assert "[  PASSED  ] 0 tests" not in log.read_text(errors="replace")


# Hosts with two RDMA devices: both carry data, and a job survives the loss of a device's link.


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
    """Creates rxe1 over SECOND in addition to the guest's own rxe0 over FIRST."""
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
        _ip("link", "del", SECOND)  # this also removes the device on it


class Job(SumJob):
    """A job with two workers and a server."""

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
            rank_of_torch = {"RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
            self.spawn(f"worker {rank}", self.worker_command(rounds), {**env, **rank_of_torch})

    def sent(self) -> list[dict[str, int]]:
        """Get the bytes that each node has sent by each NIC; empty until the status has some."""
        done = captured(
            [STATUS, "--json"],
            60,
            env={"PATH": os.environ["PATH"], "BYTEPS_STATUS_PORT": self._status_port},
        )
        nodes = json.loads(done.stdout)["nodes"] if done.returncode == 0 else []
        return [{nic["nic"]: nic["sent_bytes"] for nic in node["by_nic"]} for node in nodes]

    def await_traffic(self, nic: str, more: int = MORE) -> None:
        """Wait until each node has sent this many more bytes by a NIC."""
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


@pytest.mark.on_rdma
def test_both_devices_carry_the_data(job: Job) -> None:
    job.start("rxe0,rxe1", rounds=100_000)
    for nic in (FIRST, SECOND):
        job.await_traffic(nic)
    text = job.processes["scheduler"].text
    assert len(re.findall(r"joined: .* on 2 NICs", text)) == WORKERS + SERVERS, text
    job.demand_running()


@pytest.mark.on_rdma
def test_a_job_with_two_devices_ends_well(job: Job) -> None:
    job.start(f"{FIRST},{SECOND}", rounds=30)
    job.finish()


@pytest.mark.on_rdma
def test_one_device_is_named(job: Job) -> None:
    """Only the named device carries data, although the nodes' addresses belong to the other
    device."""
    job.start("rxe1", rounds=100_000)
    job.await_traffic(SECOND)
    for node in job.sent():
        assert node.get(FIRST, 0) < node[SECOND] / 8, node
    job.demand_running()


@pytest.mark.on_rdma
def test_a_link_goes_down_and_comes_back(job: Job) -> None:
    """Messages in flight move to the other device and return; every sum is right."""
    job.start("rxe0,rxe1", rounds=100_000)
    for nic in (FIRST, SECOND):
        job.await_traffic(nic)
    _ip("link", "set", SECOND_PEER, "down")
    for rank in range(WORKERS):
        job.await_text(f"worker {rank}", r"the data connection \d with server 0.* made again after")
    job.await_traffic(FIRST)  # the last report was made earlier, when both devices carried data
    before = job.sent()
    job.await_traffic(FIRST)
    for then, now in zip(before, job.sent(), strict=True):
        assert now[SECOND] - then[SECOND] < MORE, "the link is down"
    _ip("link", "set", SECOND_PEER, "up")
    for rank in range(WORKERS):
        job.await_text(f"worker {rank}", r"data for server 0 goes from .* again")
    job.await_traffic(SECOND)
    job.demand_running()
