"""Every way in which a rank can end: the exit status and the log of every process of its job."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.multiproc.cluster import END_S, RUN_S, Cluster, Nursed, wait_all
from tests.multiproc.endings import demand_error, demand_failed, wait_for_text

Make = Callable[..., Cluster]
LOST = r"worker 1 \(.*\) was lost: its connection (was )?(closed|reset)"
RAISED = r"worker 1 \(.*\) failed: RuntimeError: no checkpoint for rank 1"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """One way to end (programs/endings.py)."""

    way: str
    status: int
    why: str = ""
    """What all others say of it, a regex; empty if it is a good end."""
    quick: bool = False
    """Tried by `make test`, too."""


ENDINGS = (
    Ending(way="return", status=0, quick=True),
    Ending(way="shutdown", status=0),
    Ending(way="handled", status=0),
    Ending(way="exit-0", status=0, quick=True),
    Ending(way="forked-0", status=0),
    Ending(way="raise", status=1, why=RAISED, quick=True),
    Ending(way="finally", status=1, why=RAISED),
    Ending(way="exit-3", status=3, why=r"worker 1 \(.*\) failed: exit status 3", quick=True),
    Ending(way="exit-text", status=1, why=r"worker 1 \(.*\) failed: exit status 1"),
    Ending(way="forked-3", status=3, why=r"worker 1 \(.*\) failed: exit status 3"),
    Ending(way="_exit-0", status=0, why=LOST),
    Ending(way="_exit-3", status=3, why=LOST),
    Ending(way="kill", status=-signal.SIGKILL, why=LOST, quick=True),
    Ending(way="term", status=-signal.SIGTERM, why=LOST),
    Ending(way="hang", status=-signal.SIGKILL, why=LOST),
)
EACH = pytest.mark.parametrize(
    "ending",
    [
        pytest.param(ending, id=ending.way, marks=() if ending.quick else pytest.mark.thorough)
        for ending in ENDINGS
    ],
)
EACH_THOROUGH = pytest.mark.parametrize("ending", ENDINGS, ids=[ending.way for ending in ENDINGS])


def end_rank(cluster: Cluster, ending: Ending, rank: int = 1) -> None:
    """Have it end in this way."""
    worker = cluster.workers[f"worker {rank}"]
    cluster.go("way")
    if ending.way == "hang":
        worker.send(signal.SIGKILL)
    assert worker.wait(END_S) == ending.status, worker.text


def start(
    make: Make, ending: Ending, *, keep: bool = False, **args: bool
) -> tuple[Cluster, Nursed]:
    """A job of two that has summed; rank 1 waits for its end."""
    cluster = make(workers=2, servers=2, env={"BYTEPS_KEEP": str(int(keep))})
    cluster.start("endings:ends", way=ending.way, **args)
    cluster.wait_mark("summed", range(2))
    return cluster, cluster.workers["worker 0"]


@EACH
def test_while_another_rank_works(make_cluster: Make, ending: Ending) -> None:
    """A good end leaves the others alone; another one ends all of them, and each says why."""
    cluster, other = start(make_cluster, ending)
    end_rank(cluster, ending)
    nodes = [*cluster.servers, cluster.scheduler]
    if ending.why:
        demand_error(other, ending.why)
        for node in nodes:
            demand_failed(node, ending.why)
        return
    assert other.running and all(node.running for node in nodes)
    cluster.go("end")
    cluster.finish()


@EACH_THOROUGH
@pytest.mark.thorough
def test_after_the_other_rank_has_left(make_cluster: Make, ending: Ending) -> None:
    """One that left in order does not make the job a good one."""
    cluster, other = start(make_cluster, ending, first=True)
    assert other.wait(END_S) == 0, other.text
    end_rank(cluster, ending)
    for node in [*cluster.servers, cluster.scheduler]:
        if ending.why:
            demand_failed(node, ending.why)
        else:
            assert node.wait(END_S) == 0, node.text


@EACH_THOROUGH
@pytest.mark.thorough
def test_of_a_cluster_that_is_kept(make_cluster: Make, ending: Ending) -> None:
    """It outlives a bad end, says why, and ends well with the next incarnation."""
    cluster, other = start(make_cluster, ending, keep=True)
    end_rank(cluster, ending)
    nodes = [*cluster.servers, cluster.scheduler]
    if ending.why:
        demand_error(other, ending.why)
        wait_for_text(cluster.scheduler, "generation 1 of the job failed: " + ending.why)
        for server in cluster.servers:
            wait_for_text(server, ending.why)
        again = cluster.start_worker(0, "keep:joins", title="again", world_size=1)
        assert again.wait(RUN_S) == 0, again.text
    else:
        cluster.go("end")
        assert other.wait(END_S) == 0, other.text
    wait_all(nodes, END_S)
    assert [node.wait(0) for node in nodes] == [0, 0, 0], [node.text for node in nodes]


def start_embedded(make: Make, ending: Ending, *, swapped: bool = False) -> Cluster:
    """The same in embedded mode: rank 0 starts the scheduler and a server."""
    cluster = make(workers=2)
    unset = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER", "DMLC_NUM_WORKER")
    for rank in range(2):
        env = dict.fromkeys((*unset, "BYTEPS_SECRET"))
        cluster.start_worker(
            rank, "endings:ends", env=env, way=ending.way, group=True, swapped=swapped
        )
    cluster.wait_mark("summed", range(2))
    return cluster


@EACH_THOROUGH
@pytest.mark.thorough
def test_of_an_embedded_cluster(make_cluster: Make, ending: Ending) -> None:
    """Rank 0 learns from what it has started how rank 1 ended."""
    cluster = start_embedded(make_cluster, ending)
    other = cluster.workers["worker 0"]
    end_rank(cluster, ending)
    if not ending.why:
        cluster.go("end")
        assert other.wait(END_S) == 0, other.text
        assert not list(cluster.folder.glob("byteps-embedded-*"))
        return
    assert other.wait(END_S) == 1, other.text
    assert re.search("BytePSError: " + ending.why, other.text), other.text
    # It ends those that it has started, which by then may have failed by themselves.
    assert not re.search("ended with signal (?!15)", other.text), other.text


@EACH
def test_of_the_rank_that_started_the_cluster(make_cluster: Make, ending: Ending) -> None:
    """It stays until what it started has ended, which it tells how it ends itself."""
    cluster = start_embedded(make_cluster, ending, swapped=True)
    other = cluster.workers["worker 1"]
    if not ending.why:
        cluster.go("end")
        assert other.wait(END_S) == 0, other.text
    end_rank(cluster, ending, 0)
    if not ending.why:
        assert not list(cluster.folder.glob("byteps-embedded-*"))
        return
    # Lost with it is the scheduler, which says so before it ends.
    lost = "worker 0, which started it, was lost"
    demand_error(other, lost if ending.why == LOST else ending.why.replace("worker 1", "worker 0"))


@pytest.mark.parametrize("way", ["raise", "exit-3"])
def test_while_another_rank_hangs(make_cluster: Make, way: str) -> None:
    """Scheduler and servers do not wait for it."""
    ending = next(ending for ending in ENDINGS if ending.way == way)
    cluster, other = start(make_cluster, ending, hangs=True)
    end_rank(cluster, ending)
    for node in [*cluster.servers, cluster.scheduler]:
        demand_failed(node, ending.why)
    assert other.running
    cluster.go("end")
    assert other.wait(END_S) == 0, other.text


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A worker that does not belong to the job."""

    name: str
    rank: int
    workers: int
    servers: int
    why: str


WRONG = (
    Wrong(name="first", rank=0, workers=3, servers=4, why="started for 4 servers"),
    Wrong(name="last", rank=4, workers=5, servers=2, why="started for 2 servers"),
)


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "once"])
@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.name for wrong in WRONG])
def test_a_refused_node_and_then_the_right_ones(
    make_cluster: Make, wrong: Wrong, keep: bool
) -> None:
    """One worker of a wrong launch comes first, and is refused: the right launch finds the cluster
    as if it had not come."""
    cluster = make_cluster(workers=2, servers=1, env={"BYTEPS_KEEP": str(int(keep))})
    cluster.start_nodes()
    env = {"DMLC_NUM_SERVER": str(wrong.servers), "BYTEPS_START_TIMEOUT_S": "1"}
    stray = cluster.start_worker(
        wrong.rank, "failures:init_only", title="stray", world_size=wrong.workers, env=env
    )
    other_size = f"started for {wrong.workers} workers, the scheduler for 2"
    demand_error(stray, wrong.why if keep else f"{wrong.why}|{other_size}")
    del cluster.workers["stray"]
    for rank in range(2):
        cluster.start_worker(rank, "keep:joins")
    cluster.finish()
