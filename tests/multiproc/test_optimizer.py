"""Of upstream's Python interface: what stays in the wheel works, and the rest is not in it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import Cluster, Spawned

PROGRAMS = (
    "distributed",
    "clipped",
    "passes",
    "compressed",
    "state",
    "uneven",
    "scaled",
    "broadcasts",
)


@pytest.mark.parametrize(
    ("workers", "program"),
    [(4, "distributed"), (1, "alone"), *((2, program) for program in PROGRAMS)],
)
def test_on_the_cpu(make_cluster: Callable[..., Cluster], workers: int, program: str) -> None:
    cluster = make_cluster(workers=workers, servers=1, env={"BYTEPS_OP_TIMEOUT_S": "20"})
    cluster.run(f"optimizer:{program}", device="cpu")
    if program == "broadcasts":
        said = cluster.workers["worker 0"].text
        assert "1 handles were never synchronized, the first of 'forgotten'" in said, said


def test_a_server_that_is_imported(make_cluster: Callable[..., Cluster]) -> None:
    """As upstream starts servers: `DMLC_ROLE=server python -c 'import byteps.server'`."""
    cluster = make_cluster(workers=2, servers=1)
    cluster.start_scheduler()
    command = [sys.executable, "-c", "import byteps.server"]
    env = {**cluster.node_environment(), "DMLC_ROLE": "server"}
    cluster.servers.append(Spawned("server 0", command, env, cluster.folder))
    for rank in range(2):
        cluster.start_worker(rank, "optimizer:clipped", device="cpu")
    cluster.finish()


@pytest.mark.parametrize("name", ["__version__", "common", "torch.cross_barrier", "torch.parallel"])
def test_what_nothing_tries_is_not_installed(name: str) -> None:
    assert importlib.util.find_spec(f"byteps.{name}") is None
