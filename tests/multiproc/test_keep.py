"""A cluster that outlives failures. Its scheduler and servers accept the job's next generation."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from tests.multiproc.cluster import (
    END_S,
    RUN_S,
    START_S,
    Cluster,
    stop,
    wait_all,
    wait_for_file,
)
from tests.multiproc.endings import AT_ONCE, demand_error, demand_failed, wait_for_text

KEEP = {"BYTEPS_KEEP": "1", "BYTEPS_PARTITION_BYTES": "16384"}
SHORT = {**KEEP, "BYTEPS_PEER_TIMEOUT_S": "3"}
Make = Callable[..., Cluster]


def loops(make: Make, *, workers: int, servers: int, env: dict[str, str] | None = None) -> Cluster:
    """Start a kept cluster whose workers sum until the test ends them."""
    cluster = make(workers=workers, servers=servers, env={**SHORT, **(env or {})})
    cluster.start("failures:loop")
    cluster.wait_mark("looping", range(workers))
    return cluster


def come_again(cluster: Cluster, workers: int, salt: int = 1) -> None:
    """Start the next generation, with other processes, another number of them, and the same
    names."""
    for rank in range(workers):
        cluster.start_worker(
            rank, "keep:joins", title=f"life {salt} worker {rank}", world_size=workers, salt=salt
        )
    wait_all([cluster.workers[f"life {salt} worker {rank}"] for rank in range(workers)], RUN_S)


def demand_well(cluster: Cluster) -> None:
    """Check that the last generation, and with it the cluster, ended well."""
    cluster.demand_checks()
    nodes = [*cluster.servers, cluster.scheduler]
    wait_all(nodes, END_S)
    assert [node.wait(0) for node in nodes] == [0] * len(nodes)


def test_killed_worker(make_cluster: Make) -> None:
    """The survivors' errors name the worker. Scheduler and servers stay, and another number of
    workers continues."""
    cluster = loops(make_cluster, workers=3, servers=2)
    cluster.workers["worker 1"].send(signal.SIGKILL)
    for rank in (0, 2):
        demand_error(cluster.workers[f"worker {rank}"], r"worker 1\b.*lost")
    wait_for_text(cluster.scheduler, r"generation 1 of the job failed: worker 1 .* generation 2")
    come_again(cluster, 4)
    demand_well(cluster)


def test_kept_servers_outlive_each_failure(make_cluster: Make) -> None:
    """Each failure ends a generation. The servers outlive all of them."""
    cluster = loops(make_cluster, workers=2, servers=1)
    for life in range(1, 4):
        victim = cluster.workers["worker 1" if life == 1 else f"life {life - 1} worker 1"]
        victim.send(signal.SIGKILL)
        victim.wait(END_S)
        marks = {}
        for rank in range(2):
            title = f"life {life} worker {rank}"
            new = cluster.start_worker(rank, "keep:joins", title=title, salt=life, stays=True)
            marks[cluster.folder / f"mark.joined{life}.{rank}"] = new
        for mark, worker in marks.items():
            wait_for_file(mark, START_S, [worker])
    cluster.go("end3")
    wait_all([cluster.workers[f"life 3 worker {rank}"] for rank in range(2)], RUN_S)
    assert "waiting for generation 4" in cluster.scheduler.text
    assert [cluster.workers[f"life 3 worker {rank}"].status for rank in range(2)] == [0, 0]
    nodes = [*cluster.servers, cluster.scheduler]
    wait_all(nodes, END_S)
    assert [node.wait(0) for node in nodes] == [0, 0]


def test_killed_server(make_cluster: Make) -> None:
    """Another server gets the killed server's rank; the surviving server goes on."""
    cluster = loops(make_cluster, workers=2, servers=2)
    lost = cluster.servers.pop(1)
    lost.send(signal.SIGKILL)
    for worker in list(cluster.workers.values()):
        demand_error(worker, r"server [01]\b.*lost")
    lost.wait(END_S)
    cluster.start_server()
    come_again(cluster, 2)
    demand_well(cluster)


def test_killed_scheduler(make_cluster: Make) -> None:
    """Servers wait for another scheduler at the same address, as long as other nodes wait for a
    server."""
    cluster = loops(make_cluster, workers=1, servers=2)
    lost, port = cluster.scheduler, cluster.port
    assert lost is not None
    lost.send(signal.SIGKILL)
    demand_error(cluster.workers["worker 0"], r"scheduler .*was lost")
    lost.wait(END_S)
    (cluster.folder / "scheduler.port").unlink()
    cluster.start_scheduler()
    assert cluster.port == port
    come_again(cluster, 2)
    demand_well(cluster)


def test_stopped_worker_of_an_old_generation(make_cluster: Make) -> None:
    """The worker is declared lost because it is silent, while a worker of the next generation waits
    for the same rank. When the old worker continues, it gets an error, and has no effect."""
    cluster = loops(make_cluster, workers=2, servers=1)
    old = cluster.workers["worker 1"]
    stop(old)
    for rank in range(2):
        cluster.start_worker(rank, "keep:joins", title=f"life 1 worker {rank}", salt=1, stays=True)
    demand_error(cluster.workers["worker 0"], r"worker 1\b.*no heartbeat")
    new = [cluster.workers[f"life 1 worker {rank}"] for rank in range(2)]
    for rank in range(2):
        wait_for_file(cluster.folder / f"mark.joined1.{rank}", START_S, [new[rank]])
    old.send(signal.SIGCONT)
    demand_error(old, r"worker 1\b.*lost|scheduler .*lost|generation 1")
    cluster.go("end1")
    wait_all(new, RUN_S)
    assert [worker.status for worker in new] == [0, 0], [worker.text for worker in new]
    demand_well(cluster)


def test_a_worker_of_another_job_waits_until_its_timeout(make_cluster: Make) -> None:
    """A worker of another job waits for a free rank no longer than BYTEPS_START_TIMEOUT_S."""
    cluster = make_cluster(workers=1, servers=1, env=KEEP)
    cluster.start("keep:joins", stays=True)
    cluster.wait_mark("joined0", [0])
    env = {"BYTEPS_START_TIMEOUT_S": "2"}
    surplus = cluster.start_worker(0, "failures:init_only", title="surplus", env=env)
    demand_error(surplus, "has a worker 0 .* already", "BYTEPS_START_TIMEOUT_S=2")
    cluster.go("end0")
    wait_all([cluster.workers["worker 0"]], RUN_S)
    demand_well(cluster)


def test_workers_that_stay_away(make_cluster: Make) -> None:
    """A generation that never gathers ends with the missing nodes' names, and the next one may
    start."""
    cluster = make_cluster(workers=2, servers=1, env={**KEEP, "BYTEPS_START_TIMEOUT_S": "4"})
    cluster.start_nodes()
    alone = cluster.start_worker(0, "failures:init_only")
    demand_error(alone, "1 of 2 workers", "missing: worker 1")
    cluster.set_env({"BYTEPS_START_TIMEOUT_S": "60"})
    come_again(cluster, 1)
    demand_well(cluster)


def test_an_error_of_the_user_s(make_cluster: Make) -> None:
    """Workers that raise do not count as finished."""
    cluster = make_cluster(workers=2, servers=1, env=KEEP)
    cluster.start("keep:raises")
    cluster.wait_mark("summed", range(2))
    cluster.go("raise")
    wait_all(cluster.workers.values(), END_S)
    assert [worker.status for worker in cluster.workers.values()] == [1, 1]
    wait_for_text(
        cluster.scheduler,
        r"generation 1 of the job failed: worker [01] \(.*\) failed: "
        r"RuntimeError: no checkpoint for rank [01]",
    )
    come_again(cluster, 2)
    demand_well(cluster)


def test_a_sum_that_failed(make_cluster: Make) -> None:
    """No process was lost, but one sum failed, and then all shut down. This counts as a failure."""
    cluster = make_cluster(workers=2, servers=1, env={**KEEP, "BYTEPS_OP_TIMEOUT_S": "2"})
    cluster.start("keep:lacks_one")
    wait_all(cluster.workers.values(), END_S)
    cluster.demand_checks()
    cluster.set_env({"BYTEPS_OP_TIMEOUT_S": "600"})
    come_again(cluster, 2)
    demand_well(cluster)


def test_kept_servers_are_told_to_end(make_cluster: Make) -> None:
    """A signal ends a kept scheduler or server, just as one that is not kept."""
    cluster = make_cluster(workers=2, servers=2, env={**SHORT, **AT_ONCE})
    cluster.start("failures:loop")
    cluster.wait_mark("looping", range(2))
    for node in [*cluster.servers, cluster.scheduler]:
        node.send(signal.SIGTERM)
        assert node.wait(END_S) in (143, -signal.SIGTERM), node.text
    for worker in cluster.workers.values():
        demand_error(worker, r"(server [01]|scheduler) .*stopped by SIGTERM|was lost")


def test_server_that_no_scheduler_wants(make_cluster: Make) -> None:
    """A kept server that has lost its scheduler ends if no scheduler answers for
    BYTEPS_START_TIMEOUT_S."""
    cluster = loops(make_cluster, workers=1, servers=1, env={"BYTEPS_START_TIMEOUT_S": "3"})
    cluster.scheduler.send(signal.SIGKILL)
    demand_failed(
        cluster.servers[0],
        r"scheduler .*was lost.*; waiting for the next generation",
        r"did not answer within 3.0 s \(BYTEPS_START_TIMEOUT_S=3\)",
    )


def test_again_in_one_process(make_cluster: Make) -> None:
    """After a failure, workers call bps.shutdown() and bps.init() again, with one worker less."""
    survivors = (1, 2)
    cluster = make_cluster(workers=3, servers=2, env=SHORT)
    ranks = {str(old): new for new, old in enumerate(survivors)}
    cluster.start("keep:again_in_one_process", ranks=ranks)
    cluster.wait_mark("looping", range(3))
    (dead,) = {0, 1, 2} - set(survivors)
    cluster.workers[f"worker {dead}"].send(signal.SIGKILL)
    workers = [cluster.workers[f"worker {rank}"] for rank in survivors]
    wait_all(workers, RUN_S)
    assert [worker.status for worker in workers] == [0, 0], [worker.text for worker in workers]
    for rank in survivors:
        failure = (cluster.folder / f"failure.{rank}").read_text()
        assert re.search(rf"worker {dead}\b.*lost", failure), failure
    demand_well(cluster)


def test_again_in_embedded_mode(make_cluster: Make) -> None:
    """Rank 0 has started the scheduler and servers next to the ranks. When it dies, they are
    started anew."""
    survivors = (1, 2)
    cluster = make_cluster(workers=3, servers=1, env={"BYTEPS_PARTITION_BYTES": "16384"})
    ranks = {str(old): new for new, old in enumerate(survivors)}
    no_cluster = dict.fromkeys(("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER"))
    for rank in range(3):
        cluster.start_worker(
            rank,
            "keep:again_in_one_process",
            env={**no_cluster, "DMLC_NUM_WORKER": None, "BYTEPS_SECRET": None},
            ranks=ranks,
            group=True,
        )
    cluster.wait_mark("looping", range(3))
    (dead,) = {0, 1, 2} - set(survivors)
    cluster.workers[f"worker {dead}"].send(signal.SIGKILL)
    workers = [cluster.workers[f"worker {rank}"] for rank in survivors]
    wait_all(workers, RUN_S)
    cluster.demand_checks()
    assert [worker.status for worker in workers] == [0, 0], [worker.text for worker in workers]
