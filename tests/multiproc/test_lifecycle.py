"""Jobs that leave, rejoin, run side by side, idle and fork. Also errors of workers for invalid
settings."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import END_S, Cluster, cpu_seconds, wait_all, wait_for_file
from tests.multiproc.endings import connections_of, demand_error

IDLE_S = 2.0
# Limit of CPU time as a fraction of a core. Upstream's polling loops use whole cores.
IDLE_LIMIT = 0.10


def test_suspend_and_resume(make_cluster: Callable[..., Cluster]) -> None:
    """A worker that is suspended for longer than the peer timeout does not count as lost."""
    env = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_PEER_TIMEOUT_S": "1"}
    cluster = make_cluster(workers=2, servers=2, env=env)
    cluster.start("lifecycle:suspend_resume", servers=2)
    for time_away in range(2):
        cluster.wait_mark(f"away{time_away}", range(2))
        time.sleep(2.5)  # Nothing shows the end of this time. The nodes must still run after it.
        assert all(process.running for process in cluster.everyone())
        cluster.go(f"back{time_away}")
    cluster.finish()


def test_a_forked_child_leaves_the_job_alone(make_cluster: Callable[..., Cluster]) -> None:
    """A data loader's child, for example, runs the exit handlers of its parent."""
    make_cluster(workers=2, servers=1).run("lifecycle:fork_and_exit")


def test_two_jobs_at_once(make_cluster: Callable[..., Cluster]) -> None:
    """Two jobs with the same names, sizes and rounds, but other values, do not mix."""
    jobs = [make_cluster(workers=2, servers=1) for _ in range(2)]
    for number, job in enumerate(jobs):
        job.start("lifecycle:sums", rounds=60, salt=3 * number)
    for job in jobs:
        job.finish()


def test_init_and_shutdown(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2).run("lifecycle:many_lives")


def test_without_shutdown(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2).run("lifecycle:no_shutdown")


def test_idle_processes_use_little_cpu(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=1)
    cluster.start("lifecycle:idle")
    cluster.wait_mark("idle", range(2))
    time.sleep(0.3)  # In this pause the cleanup of the last operation finishes.
    before = {process.title: cpu_seconds(process.pid) for process in cluster.everyone()}
    time.sleep(IDLE_S)
    used = {
        process.title: (cpu_seconds(process.pid) - before[process.title]) / IDLE_S
        for process in cluster.everyone()
    }
    cluster.go("on")
    cluster.finish()
    assert max(used.values()) < IDLE_LIMIT, f"of a core, while idle: {used}"


@pytest.mark.parametrize(
    ("nodes", "settings", "connections"),
    [
        (1, {"BYTEPS_IO_THREADS": "4"}, 4),
        (1, {"BYTEPS_IO_THREADS": "2"}, 2),
        (2, {"BYTEPS_IO_THREADS": "4"}, 3),
        (1, {"BYTEPS_IO_THREADS": "4", "BYTEPS_CONNECTIONS": "1"}, 1),
    ],
)
def test_connections(
    make_cluster: Callable[..., Cluster], nodes: int, settings: dict[str, str], connections: int
) -> None:
    """The link (fast inside a host) and the number of threads decide the number of connections."""
    cluster = make_cluster(workers=nodes, servers=nodes, env=settings)
    cluster.start("lifecycle:idle")
    cluster.wait_mark("idle", range(nodes))
    made = connections_of(cluster.workers["worker 0"].pid)
    port = int(wait_for_file(cluster.folder / "server 0.port", END_S).split()[1])
    cluster.go("on")
    cluster.finish()
    assert len([connection for connection in made if connection.remote == port]) == connections


def test_speed_and_config(make_cluster: Callable[..., Cluster]) -> None:
    """get_pushpull_speed returns a figure after traffic; print_config names every variable."""
    cluster = make_cluster(workers=2, servers=1)
    cluster.run("lifecycle:speed")
    printed = cluster.workers["worker 0"].text
    for name in ("DMLC_PS_ROOT_URI", "DMLC_NUM_WORKER", "BYTEPS_PARTITION_BYTES"):
        assert name in printed
    assert "12345" not in printed
    assert re.search(rf"DMLC_PS_ROOT_PORT\W.*\b{cluster.port}\b", printed)


def test_nothing_is_left_in_shared_memory(make_cluster: Callable[..., Cluster]) -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    cluster = make_cluster(workers=2, servers=1)
    cluster.run("lifecycle:sums", rounds=3)
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert not {name for name in after - before if "byteps" in name.lower()}
    left = {path.name for path in cluster.folder.iterdir() if path.is_socket()}
    assert not left


# Workers read the same table of settings, and report invalid ones in bps.init().


BAD = [
    ("RANK", "x"),
    ("RANK", "1"),  # The size is 1, so only rank 0 exists.
    ("WORLD_SIZE", "0"),
    ("WORLD_SIZE", "1.0"),
    ("DMLC_NUM_SERVER", "-1"),
    ("DMLC_PS_ROOT_PORT", "65536"),
    ("DMLC_PS_ROOT_PORT", "http"),
    ("BYTEPS_PARTITION_BYTES", "0"),
    ("BYTEPS_PARTITION_BYTES", "4 MB"),
    ("BYTEPS_PUSH_THREAD", "65"),
    ("BYTEPS_SERVER_WINDOW_BYTES", "4k"),
    ("BYTEPS_KEY_HASH_FN", "md5"),
    ("BYTEPS_LOG_LEVEL", "loud"),
    ("BYTEPS_PEER_TIMEOUT_S", "30s"),
    ("BYTEPS_OP_TIMEOUT_S", ""),
]


def test_bad_values(make_cluster: Callable[..., Cluster]) -> None:
    """A single process tries all bad values: after a refused init it can call init again."""
    cluster = make_cluster(workers=1, env={"BYTEPS_START_TIMEOUT_S": "2"})
    cluster.port = 9
    worker = cluster.start_worker(0, "lifecycle:bad_values", bad=BAD)
    wait_all([worker], END_S)
    cluster.demand_checks()
    assert worker.status == 0


def test_contradictions(make_cluster: Callable[..., Cluster]) -> None:
    """The variables RANK and DMLC_WORKER_ID, or WORLD_SIZE and DMLC_NUM_WORKER, are both set."""
    cluster = make_cluster(workers=2, env={"BYTEPS_START_TIMEOUT_S": "2"})
    cluster.port = 9
    worker = cluster.start_worker(0, "lifecycle:disagreeing_ranks")
    wait_all([worker], END_S)
    cluster.demand_checks()
    assert worker.status == 0


def test_init_after_a_refused_init(make_cluster: Callable[..., Cluster]) -> None:
    """The same process uses an invalid value, and then a valid one."""
    make_cluster(workers=1).run("lifecycle:second_try")


# Processes forked from a worker neither disturb its job nor hide its end.


def test_children_cannot_reach_the_job(make_cluster: Callable[..., Cluster]) -> None:
    """A child also has the state of encrypted connections, but cannot use it."""
    make_cluster(workers=2, servers=2, env={"BYTEPS_TLS": "1"}).run("failures:children")


def test_data_loaders(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1).run("failures:loads_data")


def test_a_killed_worker_is_noticed_by_its_connection(
    make_cluster: Callable[..., Cluster],
) -> None:
    """The silence of the worker would be noticed later than this test waits."""
    cluster = make_cluster(workers=2, servers=1, env={"BYTEPS_PEER_TIMEOUT_S": "3000"})
    workers = cluster.start("failures:killed")
    cluster.wait_mark("sums", (0, 1))
    cluster.wait_mark("child", (1,))
    workers[1].send(signal.SIGKILL)
    demand_error(workers[0], r"worker 1 \(.*\) was lost: its connection closed")
    cluster.go("end")
    cluster.wait_mark("ended", ())
