"""The optimizer on the servers, sums in few bits, and local steps: results, refusals, and agreement
of all ranks, also when one is killed."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import END_S, RUN_S, Cluster, wait_all

ENV = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_OP_TIMEOUT_S": "60"}


def demand_same_bits(cluster: Cluster) -> None:
    """Check that every note has the same bits on every rank."""
    names = {path.name.rsplit(".", 1)[0] for path in cluster.folder.glob("bits.*")}
    assert names
    for name in names:
        fingerprints = {
            (cluster.folder / f"{name}.{rank}").read_text()
            for rank in range(cluster.workers_wanted)
        }
        assert len(fingerprints) == 1, name


def test_steps(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=4, servers=3, env=ENV)
    cluster.run("server_optimizer:updates", device="cpu")
    demand_same_bits(cluster)


def test_programs_that_torch_runs(make_cluster: Callable[..., Cluster]) -> None:
    """Loss scaling with one overflowing rank, closures, several passes and so on."""
    env = {**ENV, "BYTEPS_OP_TIMEOUT_S": "20"}
    make_cluster(workers=2, servers=2, env=env).run("averages:as_ddp_on_servers")


def test_clipping(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=2, env=ENV)
    cluster.run("server_optimizer:clipped", device="cpu")
    demand_same_bits(cluster)


def test_steps_that_are_tried(make_cluster: Callable[..., Cluster]) -> None:
    """Servers make speculative steps before it is known whether the steps are clipped."""
    cluster = make_cluster(workers=2, servers=2, env=ENV)
    cluster.run("server_optimizer:speculates", device="cpu")
    demand_same_bits(cluster)


def test_tensors_live_as_long_as_they_are_used(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=ENV).run("server_optimizer:keeps_memory")


def test_a_step_that_is_interrupted(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=ENV).run("server_optimizer:interrupted", device="cpu")


def test_a_state_that_does_not_fit(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=ENV).run("server_optimizer:loads", device="cpu")


def test_two_server_optimizers_of_one_name(make_cluster: Callable[..., Cluster]) -> None:
    """All ranks refuse the second optimizer while any of them uses the first one."""
    make_cluster(workers=3, servers=2, env=ENV).run("server_optimizer:names", servers=2)


def test_members_that_disagree(make_cluster: Callable[..., Cluster]) -> None:
    """Members disagree on a learning rate. If servers update at once, all members get an error.
    Otherwise at least the second one does."""
    cluster = make_cluster(workers=2, servers=1, env=ENV)
    cluster.run("server_optimizer:disagree")
    errors = {path.name: path.read_text() for path in cluster.folder.glob("disagree.*")}
    assert {"disagree.None.0", "disagree.None.1"} <= set(errors)
    assert any(name.startswith("disagree.1.0") for name in errors)
    for text in errors.values():
        assert re.search(
            r"disagree on a step .*rates 0\.5.*rates 1\.5|rates 1\.5.*rates 0\.5", text
        )


def test_a_server_optimizer_refuses(make_cluster: Callable[..., Cluster]) -> None:
    env = {**ENV, "BYTEPS_SERVER_STATE_BYTES": "40000"}
    make_cluster(workers=2, servers=1, env=env).run("server_optimizer:refused")


# The optimizer on the servers, when a rank or a server is killed within a step.


KEPT = {
    "BYTEPS_PARTITION_BYTES": "4096",
    "BYTEPS_OP_TIMEOUT_S": "60",
    "BYTEPS_KEEP": "1",
    "BYTEPS_PEER_TIMEOUT_S": "5",
}
PHASES = ("before", "pushed", "answered", "again", "after")


@pytest.mark.parametrize("victim", ["server", pytest.param("rank", marks=pytest.mark.thorough)])
def test_a_process_is_killed_at_each_phase_of_a_step(
    make_cluster: Callable[..., Cluster], victim: str
) -> None:
    """A rank or server is killed in each phase of a speculative step. All surviving ranks end with
    an error that names the lost process. No rank has parameters of a step whose norm it does not
    know. The job resumes from its checkpoint with the bits of a job without losses."""
    cluster = make_cluster(workers=2, servers=2, env=KEPT)
    cluster.start_nodes()
    for life, phase in enumerate((*PHASES, None)):
        server = cluster.servers[-1] if victim == "server" and phase else None
        workers = [
            cluster.start_worker(
                rank,
                "lost_servers:dies",
                title=f"life {life} worker {rank}",
                device="cpu",
                life=life,
                phase=phase,
                server=server and server.pid,
            )
            for rank in range(2)
        ]
        wait_all(workers, RUN_S)
        alive = [rank for rank in range(2) if phase is None or victim == "server" or rank == 0]
        for rank, worker in enumerate(workers):
            assert worker.status == (0 if rank in alive else -signal.SIGKILL), worker.text
        left = {(cluster.folder / f"left{life}.{rank}").read_text() for rank in alive}
        assert len(left) == 1, "ranks are left with different parameters"
        for rank in alive if phase else ():
            error = (cluster.folder / f"error{life}.{rank}").read_text()
            lost = r"server [01]\b.*lost" if victim == "server" else r"worker 1\b.*lost"
            assert re.search(lost, error), f"{phase}: {error}"
        if server is not None:
            server.wait(END_S)
            cluster.start_server()
    cluster.demand_checks()


# Sums in blocks of eight and four bits.


IN_ORDER = {"BYTEPS_DETERMINISTIC": "1", "BYTEPS_OP_TIMEOUT_S": "120"}


def test_benchmark_of_learning_emulates_bits(make_cluster: Callable[..., Cluster]) -> None:
    """The results of bench/learning in one process equal those of workers and servers."""
    make_cluster(workers=3, servers=2, env=IN_ORDER).run("learning:steps")


@pytest.mark.parametrize(
    ("workers", "servers"),
    [
        pytest.param(1, 1, marks=pytest.mark.thorough),
        pytest.param(2, 1, marks=pytest.mark.thorough),
        (3, 2),
        pytest.param(3, 4, marks=pytest.mark.thorough),
    ],
)
def test_sums(make_cluster: Callable[..., Cluster], workers: int, servers: int) -> None:
    """The bits do not depend on the number of servers."""
    make_cluster(workers=workers, servers=servers, env=IN_ORDER).run("few_bits:sums")


@pytest.mark.thorough  # tests/server/accumulator_test.cc covers this number, too.
def test_sums_of_more_ranks_than_are_added_at_once(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=10, servers=1, env=IN_ORDER).run("few_bits:parts")


@pytest.mark.parametrize("servers", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_sums_that_are_rounded_by_chance(
    make_cluster: Callable[..., Cluster], servers: int
) -> None:
    """The bits do not depend on the numbers of partitions and servers."""
    chance = {"BYTEPS_STOCHASTIC_ROUNDING": "1", "BYTEPS_PARTITION_BYTES": "4096"}
    make_cluster(workers=2, servers=servers, env=IN_ORDER | chance).run("few_bits:by_chance")


def test_parts(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=2, env=IN_ORDER).run("few_bits:parts")


def test_what_is_not_finite(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=IN_ORDER).run("few_bits:not_finite")


def test_what_was_lost_can_be_forgotten(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=2, env=IN_ORDER).run("few_bits:forgotten")


def test_losses_are_saved_and_loaded(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=2, env=IN_ORDER).run("few_bits:saved")


def test_refusals(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=IN_ORDER).run("few_bits:refused")


@pytest.mark.parametrize(
    ("workers", "servers"),
    [
        (2, 2),
        pytest.param(3, 1, marks=pytest.mark.thorough),
        pytest.param(2, 4, marks=pytest.mark.thorough),
    ],
)
def test_steps_of_the_optimizer_on_the_servers(
    make_cluster: Callable[..., Cluster], workers: int, servers: int
) -> None:
    """The bits do not depend on the number of servers."""
    env = {**IN_ORDER, "BYTEPS_PARTITION_BYTES": "4096"}
    cluster = make_cluster(workers=workers, servers=servers, env=env)
    cluster.run("few_bits:steps")
    demand_same_bits(cluster)


def test_what_an_optimizer_on_the_servers_refuses(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1, env=IN_ORDER).run("few_bits:refused_by_servers")


# Replicas that step on their own, and exchange parameters once in many steps.


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_steps_are_those_of_torch(make_cluster: Callable[..., Cluster], workers: int) -> None:
    make_cluster(workers=workers, servers=2).run("optimizer:equals_torch")


def test_local_steps_are_those_of_the_benchmark(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=3, servers=2, env=IN_ORDER).run("learning:local_steps")


def test_differences_in_few_bits_add_up(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=3, servers=2).run("optimizer:few_bits_add_up")


def test_fragments(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1).run("optimizer:fragments")


def test_fragments_without_values(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1).run("optimizer:fragments_without_values")


def test_members_stay_alike(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=3, servers=2).run("optimizer:momentum_keeps_members_alike")


def test_refusals_of_local_steps(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1).run("optimizer:refused")
