"""The programs of tests/gpu, on the CPU; and what does not depend on where a tensor is."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import Cluster

SMALL = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_OP_TIMEOUT_S": "60"}


@pytest.mark.parametrize(
    "program", ["every_dtype", "rounds_in_flight", "wire_types", "wanted_part"]
)
def test_on_the_cpu(make_cluster: Callable[..., Cluster], program: str) -> None:
    cluster = make_cluster(workers=2, servers=2, env=SMALL)
    cluster.run(f"devices:{program}", device="cpu")


def test_synchronize_can_be_interrupted(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(workers=2, servers=1, env=SMALL)
    cluster.start("devices:interrupted", device="cpu")
    cluster.wait_mark("waiting", [0])
    cluster.workers["worker 0"].send(signal.SIGINT)
    cluster.wait_mark("interrupted", [0])
    cluster.go("push")
    cluster.finish()
