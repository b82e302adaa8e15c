"""What only RDMA can suffer: each is a named error, everywhere, in time."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import END_S, Cluster, wait_all
from endings import demand_error, demand_failed, error_of
from transports import make

RDMA = make("rdma")
SHORT = {
    "BYTEPS_PEER_TIMEOUT_S": "5",
    "BYTEPS_START_TIMEOUT_S": "6",
    "BYTEPS_PARTITION_BYTES": "4096",
}
Make = Callable[..., Cluster]

pytestmark = pytest.mark.on_rdma


@pytest.fixture
def make_breakable(make_cluster: Make) -> Make:
    """Makes clusters whose workers can be broken from inside; see conftest.py's nursery."""

    def make_one(*, env: dict[str, str] | None = None, **settings: int) -> Cluster:
        return make_cluster(host=RDMA.host, env={**RDMA.env, **SHORT, **(env or {})}, **settings)

    return make_one


@pytest.mark.parametrize("plane", ["data", "control"])
def test_one_plane_of_a_worker_fails(make_breakable: Make, run_dir: Path, plane: str) -> None:
    """The other plane still works; nobody waits for what cannot come."""
    order = run_dir / "break"
    cluster = make_breakable(workers=2, servers=2)
    cluster.start_nodes()
    cluster.start_worker(0, "failures:loop", env={"MEDDLE_BREAK": str(order)})
    cluster.start_worker(1, "failures:loop")
    cluster.wait_mark("looping", range(2))
    part = run_dir / "break.part"
    part.write_text(plane)
    part.rename(order)
    wait_all(cluster.everyone(), END_S)
    broken, other = (cluster.workers[f"worker {rank}"] for rank in range(2))
    # Either end of the connection may be the one that is called lost.
    demand_error(broken, r"(worker 0|server \d|scheduler)\b.*lost")
    demand_error(other, r"(worker 0|server \d)\b.*lost")
    if plane == "data":
        demand_error(broken, r"data plane")
    for node in (*cluster.servers, cluster.scheduler):
        demand_failed(node, r"(worker 0|server \d)\b.*lost")


@pytest.mark.parametrize("version", [0, 1, 77])
def test_another_version_is_refused(make_breakable: Make, version: int) -> None:
    """A worker of another build: it is told why, and so is the log of who refused it."""
    cluster = make_breakable(workers=1, servers=1)
    cluster.start_nodes()
    worker = cluster.start_worker(0, "failures:init_only", env={"MEDDLE_VERSION": str(version)})
    wait_all([worker], END_S)
    demand_error(worker, rf"version {version}\b", r"version 3\b")
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
    demand_error(worker, r"has not this job's secret")


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"BYTEPS_SECRET": "another secret, as long"}, r"has not this job's secret.*BYTEPS_SECRET"),
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
    """A worker of a job before, at a server's address that the new job's has now."""
    cluster = make_breakable(workers=1, servers=1, env={"BYTEPS_AUTH": "0"})
    cluster.start_nodes()
    worker = cluster.start_worker(0, "failures:loop", env={"MEDDLE_JOB": "12345"})
    wait_all(cluster.everyone(), END_S)
    demand_error(worker, r"it belongs to another job")


def test_another_processes_id_is_refused(make_breakable: Make) -> None:
    """Worker 1 says that it is worker 0."""
    cluster = make_breakable(workers=2, servers=1, env={"BYTEPS_AUTH": "0"})
    cluster.start_nodes()
    other = cluster.start_worker(0, "failures:loop")
    worker = cluster.start_worker(1, "failures:loop", env={"MEDDLE_RANK": "0"})
    wait_all(cluster.everyone(), END_S)
    errors = error_of(worker) + error_of(other)
    assert "another process is connected under its node id" in errors, errors


def test_impossible_claim_is_refused(make_breakable: Make) -> None:
    """A value of 8 TiB: no memory is looked for."""
    partition = {"BYTEPS_PARTITION_BYTES": "65536"}  # too large for a frame
    cluster = make_breakable(workers=1, servers=1, env=partition)
    cluster.start_nodes()
    worker = cluster.start_worker(0, "failures:loop", env={"MEDDLE_CLAIM": str(8 << 40)})
    wait_all(cluster.everyone(), END_S)
    demand_error(worker, r"worker 0 was lost to server 0\b.*data plane", r"the size of a value")


@pytest.mark.parametrize("limit_bytes", [16 << 10, 4 << 20], ids=["16K", "4M"])
def test_too_little_locked_memory(make_breakable: Make, limit_bytes: int) -> None:
    """At the start, and when values need more than connections did."""
    cluster = make_breakable(workers=1, servers=1, env={"BYTEPS_PARTITION_BYTES": "16777216"})
    cluster.start_nodes()
    worker = cluster.start_worker(0, "planes:poor", limit_bytes=limit_bytes)
    wait_all([worker], END_S)
    demand_error(worker, r"ulimit -l", r"\d+ (bytes|KiB|KB|MB)")
    if limit_bytes > 1 << 20:  # otherwise it never joined, and the others wait for one that does
        wait_all(cluster.everyone(), END_S)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"BYTEPS_RDMA_DEVICE": "mlx9_9"}, r"BYTEPS_RDMA_DEVICE='?mlx9_9.*rxe0"),
        ({"BYTEPS_RDMA_PORT": "7"}, r"BYTEPS_RDMA_PORT=7"),
        ({"BYTEPS_RDMA_GID_INDEX": "200"}, r"BYTEPS_RDMA_GID_INDEX=200"),
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
    """The guest's device, which the test takes away, is put back."""
    shown = subprocess.run(["rdma", "link"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"rxe0/1 .*netdev (\S+)", shown)
    assert found, shown
    yield
    add = ["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", found[1]]
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
