"""Every way in which a rank can end, servers and schedulers that get signals, and processes that
are stopped: the exit status and the log of every process of the job."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.multiproc.cluster import END_S, RUN_S, Cluster, Nursed, Process, Spawned, stop, wait_all
from tests.multiproc.endings import (
    AT_ONCE,
    demand_error,
    demand_failed,
    start_looping,
    wait_for_text,
)
from tests.multiproc.test_check import start_with_socket, wait_to_hear

Make = Callable[..., Cluster]
LOST = r"worker 1 \(.*\) was lost: its connection (was )?(closed|reset)"
RAISED = r"worker 1 \(.*\) failed: RuntimeError: no checkpoint for rank 1"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """A way to end (programs/failures.py)."""

    way: str
    status: int
    why: str = ""
    """Reason that all other nodes report, as a regex. Empty if the process ends well."""
    quick: bool = False
    """Whether `make test` runs this case, too."""


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
    """Make the rank end in this way."""
    worker = cluster.workers[f"worker {rank}"]
    cluster.go("way")
    if ending.way == "hang":
        worker.send(signal.SIGKILL)
    assert worker.wait(END_S) == ending.status, worker.text


def start(
    make: Make, ending: Ending, *, keep: bool = False, **args: bool
) -> tuple[Cluster, Nursed]:
    """Start a job of two workers that has summed; rank 1 waits for its end."""
    cluster = make(workers=2, servers=2, env={"BYTEPS_KEEP": str(int(keep))})
    cluster.start("failures:ends", way=ending.way, **args)
    cluster.wait_mark("summed", range(2))
    return cluster, cluster.workers["worker 0"]


@EACH
def test_while_another_rank_works(make_cluster: Make, ending: Ending) -> None:
    """If a rank ends well, the other nodes go on. Otherwise all of them end, with the rank's
    reason."""
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
    """A rank that left normally does not make the job a success."""
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
    """A kept cluster outlives a rank that fails, reports the reason, and ends well with the next
    generation."""
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
    """Start the same in embedded mode: rank 0 starts the scheduler and a server."""
    cluster = make(workers=2)
    unset = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER", "DMLC_NUM_WORKER")
    for rank in range(2):
        env = dict.fromkeys((*unset, "BYTEPS_SECRET"))
        cluster.start_worker(
            rank, "failures:ends", env=env, way=ending.way, group=True, swapped=swapped
        )
    cluster.wait_mark("summed", range(2))
    return cluster


@EACH_THOROUGH
@pytest.mark.thorough
def test_of_an_embedded_cluster(make_cluster: Make, ending: Ending) -> None:
    """Rank 0 learns from its nodes how rank 1 ended."""
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
    # Rank 0 ends the nodes that it has started, unless they have failed by themselves before.
    assert not re.search("ended with signal (?!15)", other.text), other.text


@EACH
def test_of_the_rank_that_started_the_cluster(make_cluster: Make, ending: Ending) -> None:
    """Rank 0 reports its end to its nodes, and waits until they have ended."""
    cluster = start_embedded(make_cluster, ending, swapped=True)
    other = cluster.workers["worker 1"]
    if not ending.why:
        cluster.go("end")
        assert other.wait(END_S) == 0, other.text
    end_rank(cluster, ending, 0)
    if not ending.why:
        assert not list(cluster.folder.glob("byteps-embedded-*"))
        return
    # The scheduler is lost with rank 0, which started it, and reports this before it ends.
    lost = "worker 0, which started it, was lost"
    demand_error(other, lost if ending.why == LOST else ending.why.replace("worker 1", "worker 0"))


@pytest.mark.parametrize("way", ["raise", "exit-3"])
def test_while_another_rank_hangs(make_cluster: Make, way: str) -> None:
    """Scheduler and servers do not wait for the hanging rank."""
    ending = next(ending for ending in ENDINGS if ending.way == way)
    cluster, other = start(make_cluster, ending, hangs=True)
    end_rank(cluster, ending)
    for node in [*cluster.servers, cluster.scheduler]:
        demand_failed(node, ending.why)
    assert other.running
    cluster.go("end")
    assert other.wait(END_S) == 0, other.text


def test_a_rank_whose_connections_close_before_its_process_ends_is_named(
    make_cluster: Make,
) -> None:
    """The error names the lost rank, not the one whose closed connection torch notices first."""
    cluster = make_cluster(workers=2, servers=1)
    cluster.start("failures:waits_for_a_peer")
    cluster.wait_mark("joined", range(2))
    cluster.go("end")
    other = cluster.workers["worker 1"]
    assert other.wait(END_S) == 1, other.text
    assert re.search("RuntimeError: .*gloo.*by peer", other.text), other.text
    for node in [*cluster.servers, cluster.scheduler]:
        demand_failed(node, r"worker 0 \(.*\) was lost: its connection (was )?(closed|reset)")
        assert "worker 1 (127.0.0.1) failed" not in node.text


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


@pytest.mark.parametrize(
    ("wrong", "keep"), [(WRONG[0], True), (WRONG[1], False)], ids=["first-kept", "last-once"]
)
def test_a_refused_node_and_then_the_right_ones(
    make_cluster: Make, wrong: Wrong, keep: bool
) -> None:
    """A worker with wrong settings comes first, and is refused. The later workers are not
    affected."""
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


def test_the_rank_that_was_told_to_end_is_named(make_cluster: Make) -> None:
    """One rank gets SIGTERM. The others notice its end as an error of another library, and are not
    blamed."""
    cluster = make_cluster(workers=3, servers=1)
    workers = cluster.start("failures:meets")
    cluster.wait_mark("meeting", range(3))
    workers[1].send(signal.SIGTERM)
    wait_all(cluster.everyone(), END_S)
    why = r"\bworker 1 \(.*\) was lost: its connection"
    for node in [cluster.scheduler, *cluster.servers]:
        demand_failed(node, why)


# Processes that are stopped for a while (SIGSTOP), as in a paused virtual machine: the job goes on,
# or its error names the stopped process.


SHORT = {"BYTEPS_PEER_TIMEOUT_S": "3"}


def pause(process: Process, seconds: float) -> None:
    stop(process)
    time.sleep(seconds)
    process.send(signal.SIGCONT)


@pytest.mark.thorough
def test_a_scheduler_is_patient_after_its_own_pause(make_cluster: Make) -> None:
    """The job goes on after a pause of the scheduler that is longer than the scheduler's own time
    limit, but shorter than the limit of the other nodes."""
    cluster = make_cluster(workers=2, servers=1, env={"BYTEPS_PEER_TIMEOUT_S": "10"})
    cluster.start_scheduler()
    cluster.set_env({"BYTEPS_PEER_TIMEOUT_S": "60"})
    cluster.start_server()
    for rank in range(2):
        cluster.start_worker(rank, "failures:steady")
    cluster.wait_mark("looping", range(2))
    pause(cluster.scheduler, 14)
    # This is longer than a heartbeat of the other nodes, so any effect of the pause has happened.
    time.sleep(6)
    cluster.go("end")
    cluster.finish()


def test_scheduler(make_cluster: Make) -> None:
    """The scheduler is stopped for longer than the other nodes wait. They report this, and so does
    the scheduler itself."""
    cluster = start_looping(make_cluster, SHORT, workers=2, servers=1)
    stop(cluster.scheduler)
    workers = list(cluster.workers.values())
    wait_all([*workers, *cluster.servers], END_S)
    for worker in workers:
        demand_error(worker, r"scheduler .*was lost: no heartbeat")
    cluster.scheduler.send(signal.SIGCONT)
    demand_failed(
        cluster.scheduler, r"the scheduler \(.*\) stood still for \d+\.\d s; \w+ \d .* was lost"
    )


@pytest.mark.parametrize("victim", ["worker 1", "server"])
def test_node(make_cluster: Make, victim: str) -> None:
    cluster = start_looping(make_cluster, SHORT, workers=2, servers=1)
    node: Process = cluster.servers[0] if victim == "server" else cluster.workers[victim]
    stop(node)
    others = [p for p in cluster.everyone() if p is not node]
    wait_all(others, END_S)
    name = "server 0" if victim == "server" else victim
    demand_error(cluster.workers["worker 0"], rf"{name} \(.*\) was lost: no heartbeat")
    demand_failed(cluster.scheduler, rf"{name} \(.*\) was lost: no heartbeat")
    node.send(signal.SIGCONT)
    assert node.wait(END_S) == 1, node.text
    last = node.text.rstrip().rpartition("\n")[2]
    assert f"{name} (" in last, node.text


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["scheduler", "server", "worker"])
def test_twenty_seconds_by_the_defaults(make_cluster: Make, victim: str) -> None:
    """The process is stopped in the middle of traffic. No other process notices."""
    cluster = make_cluster(workers=2, servers=1)
    cluster.start("failures:sums")
    cluster.wait_mark("summing", range(2))
    nodes: dict[str, Process] = {
        "scheduler": cluster.scheduler,
        "server": cluster.servers[0],
        "worker": cluster.workers["worker 1"],
    }
    for _ in range(2):
        pause(nodes[victim], 20)
        time.sleep(2)
    cluster.go("end")
    cluster.finish()


# Servers and schedulers that get signals: running operations finish, and all nodes get the reason.


FIVE_SECONDS = {"BYTEPS_PEER_TIMEOUT_S": "5"}


def test_everything_is_told_to_end_at_once(make_cluster: Make) -> None:
    """A cluster manager sends SIGTERM to all processes at once.

    Scheduler and servers stay until the workers have saved. Some processes get the signal twice:
    from the manager and from the script that started them.
    """
    cluster = make_cluster(workers=2, servers=2)
    workers = cluster.start("failures:saves")
    cluster.wait_mark("looping", range(2))
    stopped: list[Process] = [cluster.scheduler, *cluster.servers, cluster.servers[1], *workers]
    for node in stopped:
        node.send(signal.SIGTERM)
    wait_all(cluster.everyone(), END_S)
    cluster.demand_checks()
    assert [worker.status for worker in workers] == [0, 0]
    assert sorted(path.name for path in cluster.folder.glob("mark.saved.*")) == [
        "mark.saved.0", "mark.saved.1"
    ]  # fmt: skip
    for node in [cluster.scheduler, *cluster.servers]:
        assert node.wait(0) == 143, node.text
        said = ("told to end by SIGTERM; serves", "done:")
        begins, done = (node.text.find(words) for words in said)
        assert 0 <= begins < done, node.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_learn_which_server_was_stopped(
    make_cluster: Callable[..., Cluster], number: signal.Signals
) -> None:
    cluster = make_cluster(workers=2, servers=2, env={**FIVE_SECONDS, **AT_ONCE})
    workers = cluster.start("failures:loop")
    cluster.wait_mark("looping", [0, 1])
    cluster.servers[1].send(number)
    wait_all(cluster.everyone(), END_S)
    assert cluster.servers[1].wait(0) == 128 + number
    for worker in workers:
        # Ranks of servers follow the order in which they registered.
        demand_error(worker, rf"server [01] \(.*\) was stopped by {number.name}")
    for node in [cluster.scheduler, *cluster.servers]:
        assert f"was stopped by {number.name}" in node.text


def start_half_a_sum(make_cluster: Callable[..., Cluster], **env: str) -> tuple[Cluster, Spawned]:
    """Start a job of two workers whose server has one worker's push of a sum, and waits for the
    other's."""
    cluster = make_cluster(workers=2, servers=1, env={**FIVE_SECONDS, **env})
    cluster.start_scheduler()
    socket = cluster.folder / "health"
    server = start_with_socket(cluster, "server", "--role", "server", socket=socket)
    cluster.servers.append(server)
    for rank in range(2):
        cluster.start_worker(rank, "lifecycle:drained")
    wait_to_hear(socket, "sums_total=1 ", server)
    wait_to_hear(socket, "open_rounds=1", server)
    return cluster, server


def test_the_sum_under_way_is_finished_first(make_cluster: Callable[..., Cluster]) -> None:
    cluster, server = start_half_a_sum(make_cluster, BYTEPS_STOP_TIMEOUT_S="3000")
    server.send(signal.SIGTERM)
    # Worker 1 has not pushed, so the server waits for it.
    cluster.go("push")
    cluster.wait_mark("summed", [0, 1])
    hurry(server)
    wait_all(cluster.everyone(), END_S)
    for rank in range(2):
        demand_error(cluster.workers[f"worker {rank}"], r"server 0 .*stopped by SIGTERM")


def hurry(node: Process) -> None:
    """Make a node that is already ending end at once."""
    while node.running:
        time.sleep(0.1)
        node.send(signal.SIGTERM)
    assert node.wait(0) == 143


@pytest.mark.parametrize("again", [False, True], ids=["the time is up", "a second signal"])
def test_the_wait_has_an_end(make_cluster: Callable[..., Cluster], again: bool) -> None:
    patience = "3000" if again else "0.3"
    cluster, server = start_half_a_sum(make_cluster, BYTEPS_STOP_TIMEOUT_S=patience)
    server.send(signal.SIGTERM)
    if again:
        hurry(server)
    assert server.wait(END_S) == 143
    demand_error(
        cluster.workers["worker 0"],
        r"server 0 .*stopped by SIGTERM before the reductions in flight were complete",
    )
    cluster.go("push")
    wait_all(cluster.everyone(), END_S)


def test_a_scheduler_that_is_stopped_says_so(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=1, servers=1, env={**FIVE_SECONDS, **AT_ONCE})
    [worker] = cluster.start("failures:loop")
    cluster.wait_mark("looping", [0])
    cluster.scheduler.send(signal.SIGTERM)
    wait_all(cluster.everyone(), END_S)
    assert cluster.scheduler.wait(0) == 143
    demand_error(
        worker,
        r"the scheduler \(.*\) was stopped by SIGTERM; its workers had not left within 0\.5 s",
    )
