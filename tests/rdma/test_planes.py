"""Data goes by data endpoints and control by control; so say the endpoints' own counters."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.multiproc.cluster import Cluster
from tests.rdma.transports import Transport

Make = Callable[..., Cluster]


@pytest.mark.transports("rdma", "rdma-one-plane", "rdma-3-endpoints", "rdma-ipv6")
def test_each_message_goes_by_its_plane(make_over: Make, transport: Transport) -> None:
    cluster = make_over(workers=2, servers=2)
    cluster.run(
        "planes:apart",
        servers=2,
        data_plane=transport.has_data_plane,
        endpoints=int(transport.env.get("BYTEPS_RDMA_DATA_ENDPOINTS", "1")),
    )


@pytest.mark.transports("rdma")
def test_heartbeats_go_by_control(make_over: Make) -> None:
    cluster = make_over(workers=2, servers=1, env={"BYTEPS_PEER_TIMEOUT_S": "6"})
    cluster.start("planes:beats")
    cluster.wait_mark("idle", range(2))
    time.sleep(4.0)  # several heartbeats
    cluster.go("on")
    cluster.finish()


@pytest.mark.transports("rdma")
def test_memory_in_the_cache_is_registered_once(make_over: Make) -> None:
    env = {"BYTEPS_PARTITION_BYTES": "65536", "BYTEPS_MIN_PARTITION_BYTES": "65536"}
    make_over(workers=2, servers=2, env=env).run("planes:once")
