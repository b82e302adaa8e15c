"""Asynchronous handles complete in any order, and names may be used in any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.multiproc.cluster import Cluster


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 3)])
def test_every_order(make_cluster: Callable[..., Cluster], workers: int, servers: int) -> None:
    env = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_OP_TIMEOUT_S": "20"}
    make_cluster(workers=workers, servers=servers, env=env).run("handles:every_order")


def test_every_order_with_many_threads(make_cluster: Callable[..., Cluster]) -> None:
    env = {
        "BYTEPS_PARTITION_BYTES": "4096",
        "BYTEPS_OP_TIMEOUT_S": "20",
        "BYTEPS_PUSH_THREAD": "4",
        "BYTEPS_SERVER_ENGINE_THREAD": "8",
        "BYTEPS_SERVER_WINDOW_BYTES": "1000000000",
    }
    make_cluster(workers=2, servers=2, env=env).run("handles:every_order")
