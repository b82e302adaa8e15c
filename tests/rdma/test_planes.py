"""Data goes by data endpoints and control by control; so say the endpoints' own counters."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

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


@pytest.mark.transports("rdma")
@pytest.mark.parametrize("budget", [1 << 20, 512 << 20])
def test_slots_of_all_workers_fit_into_their_memory(make_over: Make, budget: int) -> None:
    """A server's share of each worker is the smaller, the more of them there are."""
    cluster = make_over(workers=3, servers=1, env={"BYTEPS_RDMA_SLOT_BYTES": str(budget)})
    cluster.start("planes:small")
    cluster.wait_mark("summed", range(3))
    (server,) = cluster.servers
    status = Path(f"/proc/{server.pid}/status").read_text()
    found = re.search(r"VmPin:\s+(\d+) kB", status)
    assert found is not None, status
    # One with the scheduler, and a control and a data endpoint with each worker.
    endpoints, slot, wanted = 1 + 3 * 2, 1024 + 4096, 64 + 128
    slots = min(wanted, budget // endpoints // 4096 * 4096 // slot)
    each = (64 * slots // wanted + 128 * slots // wanted) * slot
    in_pages = -(-each // 4096) * 4096
    assert int(found[1]) * 1024 == endpoints * in_pages <= budget
    cluster.go("on")
    cluster.finish()
