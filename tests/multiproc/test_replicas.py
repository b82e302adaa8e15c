"""Replicas die, hang and come back, also with an optimizer on the servers. The others go on, and
all sums are right."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.multiproc.cluster import IMPORT_S, RUN_S, Cluster, Nursed, wait_for_file

PROGRAM = "replicas:train"
PHASES = ("pushed", "control")
"""Phases in which a replica dies here. The simulation covers all phases."""


class Replicas:
    """A job of replicas with one worker each."""

    def __init__(self, cluster: Cluster, count: int, program: str = PROGRAM) -> None:
        self.cluster, self.count, self.started = cluster, count, 0
        self.program = program

    def start(self, number: int, **args: Any) -> Nursed:
        """Start the process of a replica, for the first time or again."""
        self.started += 1
        env = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "DMLC_NUM_WORKER": str(self.count),
            "BYTEPS_REPLICA": f"{number}/{self.count}",
        }
        title = f"replica {number} life {self.started}"
        return self.cluster.start_worker(number, self.program, title=title, env=env, **args)

    def wait_done(self, number: int, step: int) -> None:
        """Wait until the replica has made this many steps."""
        path = self.cluster.folder / f"done.{number}.0"
        alive = [w for t, w in self.cluster.workers.items() if t.startswith(f"replica {number}")]
        wait_for_file(path, RUN_S, alive[-1:])
        while int(path.read_text()) < step:
            assert alive[-1].running, f"replica {number} ended before step {step}"

    def finish(self, workers: list[Nursed]) -> None:
        """Check that these workers, the scheduler and the servers end well."""
        self.cluster.finish_with(workers)

    def log(self, number: int) -> list[dict[str, Any]]:
        """Return the log of a replica's first process."""
        entries: list[dict[str, Any]] = json.loads(
            (self.cluster.folder / f"log.{number}.1.0").read_text()
        )
        return entries


@pytest.fixture
def make_replicas(make_cluster: Callable[..., Cluster]) -> Callable[..., Replicas]:
    def make(count: int, **env: str) -> Replicas:
        cluster = make_cluster(workers=count, servers=2, env=env)
        cluster.start_nodes()
        return Replicas(cluster, count)

    return make


@pytest.mark.parametrize("phase", PHASES)
def test_a_replica_dies_and_the_others_go_on(
    make_replicas: Callable[..., Replicas], phase: str
) -> None:
    job = make_replicas(3)
    dying = job.start(1, steps=12, dies=[phase, 5])
    others = [job.start(number, steps=12) for number in (0, 2)]
    assert dying.wait(IMPORT_S) == -signal.SIGKILL
    job.finish(others)
    lacking = [entry["step"] for entry in job.log(0) if entry.get("missing") == [1]]
    assert lacking[-1] == 11 and 5 <= lacking[0] <= 6
    assert lacking == list(range(lacking[0], 12))
    said = job.cluster.scheduler.text
    assert said.count("replica 1 was removed: worker 1") == 1
    assert "the others go on" in said


def test_a_replica_leaves_between_two_steps(make_replicas: Callable[..., Replicas]) -> None:
    """All pushes of the leaving replica count, and the others learn that it leaves before they
    continue."""
    job = make_replicas(3)
    leaving = job.start(1, steps=12, leaves=6)
    others = [job.start(number, steps=12) for number in (0, 2)]
    assert leaving.wait(IMPORT_S) == 128 + signal.SIGTERM
    job.finish(others)
    lacking = [entry["step"] for entry in job.log(0) if entry.get("missing") == [1]]
    assert lacking == list(range(6, 12))
    said = [entry for entry in job.log(2) if "leaving" in entry]
    assert said == [{"step": 6, "leaving": [False, True, False]}]
    removed = "replica 1 was removed: worker 1 (127.0.0.1) failed: it was told to end after step 6"
    assert removed in job.cluster.scheduler.text


def test_a_killed_replica_comes_back(make_replicas: Callable[..., Replicas]) -> None:
    job = make_replicas(3)
    others = [job.start(number, steps=80, pace=0.05) for number in (0, 2)]
    dying = job.start(1, steps=80, pace=0.05, dies=["pushed", 10])
    assert dying.wait(IMPORT_S) == -signal.SIGKILL
    job.finish([*others, job.start(1, steps=80, pace=0.05)])
    joined = [entry for entry in job.log(0) if "joined" in entry]
    assert [entry["joined"] for entry in joined] == [True]
    lacking = [entry["step"] for entry in job.log(0) if "missing" in entry]
    assert lacking and max(lacking) < joined[0]["step"], "it is in all sums from then on"


def test_a_replica_that_stands_still_is_removed(make_replicas: Callable[..., Replicas]) -> None:
    """The stopped replica sends no heartbeats. When it continues, it gets an error, and ends."""
    job = make_replicas(2, BYTEPS_PEER_TIMEOUT_S="3")
    still = job.start(1, steps=20, stands_still=["pushed", 5])
    other = job.start(0, steps=20)
    assert other.wait(RUN_S) == 0, other.text[-3000:]
    still.send(signal.SIGCONT)
    assert still.wait(RUN_S) != 0
    assert "no heartbeat for" in job.cluster.scheduler.text
    lacking = [entry["step"] for entry in job.log(0) if "missing" in entry]
    assert lacking and lacking[0] in (5, 6)


@pytest.mark.parametrize(
    ("env", "why"),
    [
        (
            {"BYTEPS_QUORUM": "2@6"},
            r"it had not pushed 'gradients' \d+\.\d s after 2 replicas \(quorum 2@6\)",
        ),
        pytest.param(
            {"BYTEPS_OP_TIMEOUT_S": "10"},
            r"it had not pushed 'gradients' for \d+\.\d s, while others waited "
            r"\(BYTEPS_OP_TIMEOUT_S=10\)",
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["quorum", "limit"],
)
def test_a_replica_that_lives_and_never_pushes_is_removed(
    make_replicas: Callable[..., Replicas], env: dict[str, str], why: str
) -> None:
    job = make_replicas(3, **env)
    stuck = job.start(1, steps=12, sleeps=["before", 5, 300])
    job.finish([job.start(number, steps=12) for number in (0, 2)])
    assert re.search(f"replica 1 was removed: {why}", job.cluster.scheduler.text)
    lacking = [entry["step"] for entry in job.log(0) if entry.get("missing") == [1]]
    assert lacking == list(range(5, 12))
    assert stuck.wait(RUN_S) != 0
    assert re.search(why, stuck.text), stuck.text[-3000:]


def test_a_quorum_waits_for_the_first_push(make_replicas: Callable[..., Replicas]) -> None:
    job = make_replicas(2, BYTEPS_QUORUM="1@6")
    job.finish(
        [
            job.start(0, steps=6),
            job.start(1, steps=6, sleeps=["before", 0, 8]),
        ]
    )
    assert "was removed" not in job.cluster.scheduler.text


def test_the_last_replica_ends_the_job(make_replicas: Callable[..., Replicas]) -> None:
    job = make_replicas(2)
    dying = [job.start(number, steps=20, dies=["before", 3 + number]) for number in (0, 1)]
    assert [worker.wait(IMPORT_S) for worker in dying] == [-signal.SIGKILL] * 2
    assert job.cluster.scheduler.wait(RUN_S) == 1
    assert "worker 1 (127.0.0.1) was lost" in job.cluster.scheduler.text


# Replicas with an optimizer on the servers: one dies, and comes back.


SERVED = "replicas:train_served"
PHASES_OF_SERVED = ("before", "pushed", "told", "answered", "control")
KINDS = {"tried and kept": 6, "after the norm": 5, "at once": 4, "tried and clipped": 7}
"""Step of each kind in which the replica dies."""
QUICK = {("tried and kept", "pushed"), ("at once", "pushed")}


@pytest.fixture
def make_served(make_cluster: Callable[..., Cluster]) -> Callable[..., Replicas]:
    def make(count: int, **env: str) -> Replicas:
        cluster = make_cluster(workers=count, servers=2, env=env)
        cluster.start_nodes()
        return Replicas(cluster, count, SERVED)

    return make


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        pytest.param(kind, phase, marks=() if (kind, phase) in QUICK else pytest.mark.thorough)
        for kind in KINDS
        for phase in PHASES_OF_SERVED
    ],
)
def test_a_replica_dies_with_the_optimizer_on_the_servers(
    make_served: Callable[..., Replicas], kind: str, phase: str
) -> None:
    """Each step has the bits of a sum over some set of members. In the end all replicas are
    equal."""
    job, step = make_served(3), KINDS[kind]
    dying = job.start(1, steps=14, dies=[phase, step])
    others = [job.start(number, steps=14) for number in (0, 2)]
    assert dying.wait(IMPORT_S) == -signal.SIGKILL
    job.finish(others)
    lacking = [entry["step"] for entry in job.log(0) if entry.get("missing") == [1]]
    assert step <= lacking[0] <= step + 1
    assert lacking == list(range(lacking[0], 14))


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_replica_comes_back_to_the_optimizer_on_the_servers(
    make_served: Callable[..., Replicas], who: int
) -> None:
    """The replica gets the servers' parameters, even if it is the one that loaded them
    initially."""
    job = make_served(3)
    others = [job.start(number, steps=40, pace=0.1) for number in range(3) if number != who]
    dying = job.start(who, steps=40, pace=0.1, dies=["pushed", 6])
    assert dying.wait(IMPORT_S) == -signal.SIGKILL
    job.finish([*others, job.start(who, steps=40, pace=0.1)])
    joined = [entry for entry in job.log(2) if "joined" in entry]
    assert [entry["joined"] for entry in joined] == [True]
    lacking = [entry["step"] for entry in job.log(2) if "missing" in entry]
    assert lacking and max(lacking) < joined[0]["step"], "it is in all steps from then on"
