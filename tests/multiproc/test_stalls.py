"""A process that stands still for a while, by SIGSTOP, as in a virtual machine that is paused: the
job goes on, or its error names the process that stood still."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import END_S, Cluster, Process, stop, wait_all
from tests.multiproc.endings import demand_error, demand_failed, start_looping

Make = Callable[..., Cluster]
SHORT = {"BYTEPS_PEER_TIMEOUT_S": "3"}


def pause(process: Process, seconds: float) -> None:
    stop(process)
    time.sleep(seconds)
    process.send(signal.SIGCONT)


def test_a_scheduler_is_patient_after_its_own_pause(make_cluster: Make) -> None:
    """It stands still for longer than it waits for others, and these for longer than it did."""
    cluster = make_cluster(workers=2, servers=1, env={"BYTEPS_PEER_TIMEOUT_S": "10"})
    cluster.start_scheduler()
    cluster.set_env({"BYTEPS_PEER_TIMEOUT_S": "60"})
    cluster.start_server()
    for rank in range(2):
        cluster.start_worker(rank, "failures:steady")
    cluster.wait_mark("looping", range(2))
    pause(cluster.scheduler, 14)
    # Longer than a heartbeat of the others: whatever it made of the pause has happened.
    time.sleep(6)
    cluster.go("end")
    cluster.finish()


def test_scheduler(make_cluster: Make) -> None:
    """For longer than the others wait: they say so, and so does the scheduler itself."""
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
    """In the middle of traffic: nobody notices."""
    cluster = make_cluster(workers=2, servers=1)
    cluster.start("stalls:sums")
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
