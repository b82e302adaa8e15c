"""Replicas with an optimizer on the servers: one dies, and comes back."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import IMPORT_S, Cluster
from tests.multiproc.test_replicas import Replicas

PROGRAM = "replicas_served:train"
PHASES = ("before", "pushed", "told", "answered", "control")
KINDS = {"tried and kept": 6, "after the norm": 5, "at once": 4, "tried and clipped": 7}
"""The step of each kind in which it dies."""


@pytest.fixture
def make_replicas(make_cluster: Callable[..., Cluster]) -> Callable[..., Replicas]:
    def make(count: int, **env: str) -> Replicas:
        cluster = make_cluster(workers=count, servers=2, env=env)
        cluster.start_nodes()
        return Replicas(cluster, count, PROGRAM)

    return make


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        pytest.param(kind, phase, marks=() if phase == "pushed" else pytest.mark.thorough)
        for kind in KINDS
        for phase in PHASES
    ],
)
def test_one_dies_and_the_others_go_on(
    make_replicas: Callable[..., Replicas], kind: str, phase: str
) -> None:
    """Each of their steps has the bits of a list of members, and in the end all are alike."""
    job, step = make_replicas(3), KINDS[kind]
    dying = job.start(1, steps=14, dies=[phase, step])
    others = [job.start(number, steps=14) for number in (0, 2)]
    assert dying.wait(IMPORT_S) == -signal.SIGKILL
    job.finish(others)
    lacking = [entry["step"] for entry in job.log(0) if entry.get("missing") == [1]]
    assert step <= lacking[0] <= step + 1
    assert lacking == list(range(lacking[0], 14))


@pytest.mark.parametrize("who", [0, 1])
def test_it_comes_back(make_replicas: Callable[..., Replicas], who: int) -> None:
    """With the parameters of the servers, also where it is the one that gave them these."""
    job = make_replicas(3)
    others = [job.start(number, steps=40, pace=0.1) for number in range(3) if number != who]
    dying = job.start(who, steps=40, pace=0.1, dies=["pushed", 6])
    assert dying.wait(IMPORT_S) == -signal.SIGKILL
    job.finish([*others, job.start(who, steps=40, pace=0.1)])
    joined = [entry for entry in job.log(2) if "joined" in entry]
    assert [entry["joined"] for entry in joined] == [True]
    lacking = [entry["step"] for entry in job.log(2) if "missing" in entry]
    assert lacking and max(lacking) < joined[0]["step"], "it is in all steps from then on"
