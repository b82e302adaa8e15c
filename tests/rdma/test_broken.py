"""Failures that only RDMA can have: each is a named error on every process, in time."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multiproc.cluster import END_S, Cluster, stop, wait_all
from tests.multiproc.endings import demand_error, demand_failed, error_of
from tests.rdma.transports import make

RDMA = make("rdma")
SHORT = {
    "BYTEPS_PEER_TIMEOUT_S": "5",
    "BYTEPS_START_TIMEOUT_S": "6",
    "BYTEPS_PARTITION_BYTES": "4096",
}
BREAKS = 12
"""Number of breaks, some in each plane of each worker, at any moment."""
MOST_BREAKS = 60
"""Upper limit of breaks until messages were in flight at a break."""
Make = Callable[..., Cluster]

pytestmark = pytest.mark.on_rdma


@pytest.fixture
def make_breakable(make_cluster: Make) -> Make:
    """Makes clusters with workers that take faults; see the nursery in conftest.py."""

    def make_one(*, env: dict[str, str] | None = None, **settings: int) -> Cluster:
        return make_cluster(host=RDMA.host, env={**RDMA.env, **SHORT, **(env or {})}, **settings)

    return make_one


def break_queue_pairs(order: Path, plane: str) -> None:
    """Break the queue pairs of a plane in the process whose MEDDLE_BREAK is `order`."""
    part = order.with_suffix(".part")
    part.write_text(plane)
    part.rename(order)


def rounds_of(cluster: Cluster) -> int:
    path = cluster.folder / "rounds.0"
    return int(path.read_text()) if path.exists() else 0


def wait_while(cluster: Cluster, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_S
    while holds():
        assert time.monotonic() < deadline, "the job stands still"
        assert all(worker.running for worker in cluster.workers.values())
        time.sleep(0.01)


def wait_for_round(cluster: Cluster) -> None:
    before = rounds_of(cluster)
    wait_while(cluster, lambda: rounds_of(cluster) == before)


def test_queue_pairs_are_made_again(make_breakable: Make, run_dir: Path) -> None:
    """Queue pairs of either plane break repeatedly, to servers and scheduler: every sum is
    exact."""
    patient = {"BYTEPS_PEER_TIMEOUT_S": "30", "BYTEPS_PARTITION_BYTES": "65536"}
    cluster = make_breakable(workers=2, servers=2, env=patient)
    cluster.start_nodes()
    orders = [run_dir / f"break {rank}" for rank in range(2)]
    for rank, order in enumerate(orders):
        env = {"MEDDLE_BREAK": str(order)}
        cluster.start_worker(rank, "failures:checked", env=env, most=200_000, limit_s=400)
    cluster.wait_mark("looping", range(2))

    def resent() -> bool:
        text = "".join(process.text for process in cluster.everyone())
        return re.search(r"messages sent again: [1-9]", text) is not None

    broken = 0
    while broken < BREAKS or (broken < MOST_BREAKS and not resent()):
        order, plane = orders[broken % 2], ("data", "control")[broken // 2 % 2]
        break_queue_pairs(order, plane)
        wait_while(cluster, order.exists)
        wait_for_round(cluster)
        broken += 1
    assert resent(), "whenever a connection broke, nothing was under way"
    cluster.go("end")
    cluster.finish()
    for worker in cluster.workers.values():
        for link in ("data connection 0 with server", "control connection 0 with (server|the sch)"):
            assert re.search(rf"the {link}.* made again", worker.text), worker.text


def test_a_damaged_greeting_is_one_more_attempt(make_breakable: Make, run_dir: Path) -> None:
    """In each replaced connection, one bit is flipped in every third greeting."""
    patient = {"BYTEPS_PEER_TIMEOUT_S": "30", "BYTEPS_PARTITION_BYTES": "65536"}
    cluster = make_breakable(workers=2, servers=1, env=patient)
    cluster.start_nodes()
    order = run_dir / "break"
    env = {"MEDDLE_BREAK": str(order), "MEDDLE_FLIP": "1"}
    broken = cluster.start_worker(0, "failures:checked", env=env, most=200_000, limit_s=400)
    cluster.start_worker(1, "failures:checked", most=200_000, limit_s=400)
    cluster.wait_mark("looping", range(2))
    breaks = 0
    while not all(f"of {what}" in broken.text for what in ("a request", "an answer")) or (
        breaks < BREAKS
    ):
        assert breaks < MOST_BREAKS, broken.text
        break_queue_pairs(order, ("data", "control")[breaks % 2])
        wait_while(cluster, order.exists)
        wait_for_round(cluster)
        breaks += 1
    cluster.go("end")
    cluster.finish()


def test_reconnecting_over_rdma_ends_after_its_time_limit(
    make_breakable: Make, run_dir: Path
) -> None:
    """After the time limit the peer is lost. The error names the link, both ends and the limit."""
    order = run_dir / "break"
    env = {"BYTEPS_RECONNECT_TIMEOUT_S": "2", "BYTEPS_PEER_TIMEOUT_S": "60"}
    cluster = make_breakable(workers=2, servers=1, env=env)
    cluster.start_nodes()
    cluster.start_worker(0, "failures:loop", env={"MEDDLE_BREAK": str(order)})
    cluster.start_worker(1, "failures:loop")
    cluster.wait_mark("looping", range(2))
    (server,) = cluster.servers
    stop(server)
    break_queue_pairs(order, "data")
    workers = list(cluster.workers.values())
    wait_all(workers, END_S)
    for worker in workers:
        demand_error(
            worker,
            r"server 0 \(.*\) was lost to worker 0 \(.*\): the data plane: .*, and could not be "
            r"made again within 2(\.0)? s \(BYTEPS_RECONNECT_TIMEOUT_S=2\)",
        )
    server.send(signal.SIGCONT)
    demand_failed(server, "was lost to worker 0")


@pytest.mark.parametrize("plane", ["data", "control"])
def test_one_plane_of_a_worker_fails(make_breakable: Make, run_dir: Path, plane: str) -> None:
    """Without reconnection the other plane still works, and no process waits for lost messages."""
    order = run_dir / "break"
    cluster = make_breakable(workers=2, servers=2, env={"BYTEPS_RECONNECT_TIMEOUT_S": "0"})
    cluster.start_nodes()
    cluster.start_worker(0, "failures:loop", env={"MEDDLE_BREAK": str(order)})
    cluster.start_worker(1, "failures:loop")
    cluster.wait_mark("looping", range(2))
    break_queue_pairs(order, plane)
    wait_all(cluster.everyone(), END_S)
    broken, other = (cluster.workers[f"worker {rank}"] for rank in range(2))
    # The error may name either end of the lost connection.
    demand_error(broken, r"(worker 0|server \d|scheduler)\b.*lost")
    demand_error(other, r"(worker 0|server \d)\b.*lost")
    if plane == "data":
        demand_error(broken, r"data plane")
    for node in (*cluster.servers, cluster.scheduler):
        demand_failed(node, r"(worker 0|server \d)\b.*lost")


@pytest.mark.parametrize("version", [0, 1, 77])
def test_another_version_is_refused(make_breakable: Make, version: int) -> None:
    """A worker of another version gets the reason, and so does the log of the node that
    refused it."""
    cluster = make_breakable(workers=1, servers=1)
    cluster.start_nodes()
    worker = cluster.start_worker(0, "failures:init_only", env={"MEDDLE_VERSION": str(version)})
    wait_all([worker], END_S)
    demand_error(worker, rf"version {version}\b", r"version 8\b")
    assert re.search(rf"version {version}\b", cluster.scheduler.text), cluster.scheduler.text


@pytest.mark.parametrize("what", ["MEDDLE_JOB", "MEDDLE_RANK"])
def test_a_changed_request_proves_nothing(make_breakable: Make, what: str) -> None:
    """The proof is bound to the job and the rank."""
    cluster = make_breakable(workers=2, servers=1)
    cluster.start_nodes()
    cluster.start_worker(0, "failures:loop")
    worker = cluster.start_worker(
        1, "failures:loop", env={what: "0" if "RANK" in what else "12345"}
    )
    wait_all(cluster.everyone(), END_S)
    demand_error(worker, r"different job secrets")


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (
            {"BYTEPS_SECRET": "another secret, as long"},
            r"different job secrets.*BYTEPS_SECRET.*BYTEPS_AUTH=0",
        ),
        ({"BYTEPS_AUTH": "0"}, r"has a secret, the peer none.*BYTEPS_AUTH=0"),
    ],
    ids=["another", "none"],
)
def test_another_secret_is_refused(make_breakable: Make, env: dict[str, str], says: str) -> None:
    cluster = make_breakable(workers=1, servers=1)
    cluster.start_nodes()
    worker = cluster.start_worker(0, "failures:init_only", env=env)
    wait_all([worker], END_S)
    demand_error(worker, says)


def test_another_job_is_refused(make_breakable: Make) -> None:
    """A worker of an earlier job finds a server of the new job at the old address."""
    cluster = make_breakable(workers=1, servers=1, env={"BYTEPS_AUTH": "0"})
    cluster.start_nodes()
    worker = cluster.start_worker(0, "failures:loop", env={"MEDDLE_JOB": "12345"})
    wait_all(cluster.everyone(), END_S)
    demand_error(worker, r"it belongs to another job")


def test_another_processes_id_is_refused(make_breakable: Make) -> None:
    """Worker 1 claims to be worker 0."""
    cluster = make_breakable(workers=2, servers=1, env={"BYTEPS_AUTH": "0"})
    cluster.start_nodes()
    other = cluster.start_worker(0, "failures:loop")
    worker = cluster.start_worker(1, "failures:loop", env={"MEDDLE_RANK": "0"})
    wait_all(cluster.everyone(), END_S)
    errors = error_of(worker) + error_of(other)
    assert "another process is connected under its node id" in errors, errors


def test_impossible_claim_is_refused(make_breakable: Make) -> None:
    """A claimed value of 8 TiB does not cause an allocation."""
    partition = {"BYTEPS_PARTITION_BYTES": "65536"}  # too large for a frame
    cluster = make_breakable(workers=1, servers=1, env=partition)
    cluster.start_nodes()
    worker = cluster.start_worker(0, "failures:loop", env={"MEDDLE_CLAIM": str(8 << 40)})
    wait_all(cluster.everyone(), END_S)
    demand_error(worker, r"worker 0 was lost to server 0\b.*data plane", r"the size of a value")


def test_place_that_was_not_offered_is_refused(make_breakable: Make) -> None:
    partition = {"BYTEPS_PARTITION_BYTES": "65536"}  # too large for a frame
    cluster = make_breakable(workers=1, servers=1, env=partition)
    cluster.start_nodes()
    worker = cluster.start_worker(0, "failures:loop", env={"MEDDLE_TAKE": "1"})
    wait_all(cluster.everyone(), END_S)
    demand_error(worker, r"worker 0 was lost to server 0\b.*data plane", r"was not offered")


@pytest.mark.parametrize("limit_bytes", [16 << 10, 4 << 20], ids=["16K", "4M"])
def test_too_little_locked_memory(make_breakable: Make, limit_bytes: int) -> None:
    """The limit is reached at the start, or later, when values need more memory than connections
    did."""
    cluster = make_breakable(workers=1, servers=1, env={"BYTEPS_PARTITION_BYTES": "16777216"})
    cluster.start_nodes()
    worker = cluster.start_worker(0, "planes:poor", limit_bytes=limit_bytes)
    wait_all([worker], END_S)
    demand_error(worker, r"ulimit -l", r"\d+ (bytes|KiB|KB|MB)")
    # with a lower limit the worker would never join, and the others would wait for it
    if limit_bytes > 1 << 20:
        wait_all(cluster.everyone(), END_S)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"BYTEPS_RDMA_DEVICE": "mlx9_9"}, r"BYTEPS_RDMA_DEVICE='?mlx9_9.*rxe0"),
        ({"BYTEPS_RDMA_DEVICE": ":7"}, r"not of port 7 \(BYTEPS_RDMA_DEVICE\)"),
        ({"BYTEPS_RDMA_DEVICE": "::200"}, r"BYTEPS_RDMA_DEVICE: GID 200 of rxe0"),
        ({"BYTEPS_RDMA_START_DEPTH": "65535"}, r"BYTEPS_RDMA_START_DEPTH=65535.*rxe0.*allows"),
        ({"BYTEPS_RDMA_RX_DEPTH": "65535"}, r"BYTEPS_RDMA_RX_DEPTH=65535.*rxe0.*allows"),
        ({"BYTEPS_RDMA_INLINE_BYTES": "100"}, r"refused.*BYTEPS_RDMA_INLINE_BYTES differs"),
        ({"BYTEPS_RDMA_MTU": "1000"}, r"BYTEPS_RDMA_MTU='1000'.*256, 512"),
        ({"DMLC_NODE_HOST": "127.0.0.1"}, r"127\.0\.0\.1.*no RDMA device has this address"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_do_not_fit(make_breakable: Make, env: dict[str, str], says: str) -> None:
    cluster = make_breakable(workers=1, servers=1)
    cluster.start_nodes()
    worker = cluster.start_worker(0, "failures:init_only", env=env)
    wait_all([worker], END_S)
    assert worker.status == 1
    assert re.search(says, error_of(worker)), error_of(worker)


@pytest.fixture
def removable() -> Iterator[None]:
    """Restores the guest's device, which the test removes."""
    shown = subprocess.run(["rdma", "link"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"rxe0/1 .*netdev (\S+)", shown)
    assert match, shown
    yield
    add = ["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", match[1]]
    subprocess.run(add, timeout=120, check=True)


def test_device_is_removed(make_breakable: Make, removable: None) -> None:
    cluster = make_breakable(workers=2, servers=1)
    cluster.start("failures:loop")
    cluster.wait_mark("looping", range(2))
    remove = subprocess.Popen(["rdma", "link", "delete", "rxe0"])
    try:
        wait_all(cluster.everyone(), END_S)
        assert remove.wait(END_S) == 0
    finally:
        remove.kill()
        remove.wait()
    for worker in cluster.workers.values():
        demand_error(worker, "lost|removed")
