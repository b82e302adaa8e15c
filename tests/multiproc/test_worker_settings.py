"""Workers read the same table of settings, and say what is wrong with them in bps.init()."""

from __future__ import annotations

from collections.abc import Callable

from tests.multiproc.cluster import END_S, Cluster, wait_all

BAD = [
    ("RANK", "x"),
    ("RANK", "1"),  # of 1
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
    """One process tries them all: a refused init leaves it able to try again."""
    cluster = make_cluster(workers=1, env={"BYTEPS_START_TIMEOUT_S": "2"})
    cluster.port = 9
    worker = cluster.start_worker(0, "settings:bad_values", bad=BAD)
    wait_all([worker], END_S)
    cluster.demand_checks()
    assert worker.status == 0


def test_contradictions(make_cluster: Callable[..., Cluster]) -> None:
    """RANK and DMLC_WORKER_ID, WORLD_SIZE and DMLC_NUM_WORKER, when both are set."""
    cluster = make_cluster(workers=2, env={"BYTEPS_START_TIMEOUT_S": "2"})
    cluster.port = 9
    worker = cluster.start_worker(0, "settings:disagreeing_ranks")
    wait_all([worker], END_S)
    cluster.demand_checks()
    assert worker.status == 0


def test_init_after_a_refused_init(make_cluster: Callable[..., Cluster]) -> None:
    """A bad value, then a good one, in one process."""
    make_cluster(workers=1).run("settings:second_try")


def test_unknown_variable_is_warned_about(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=1)
    cluster.start_nodes()
    cluster.start_worker(0, "failures:init_only", env={"BYTEPS_PUSH_THREADS": "2"})
    cluster.finish()
    lines = cluster.workers["worker 0"].text.splitlines()
    said = [line for line in lines if "BYTEPS_PUSH_THREADS" in line]
    assert len(said) == 1
    assert said[0].rstrip("?. ").endswith("BYTEPS_PUSH_THREAD")
