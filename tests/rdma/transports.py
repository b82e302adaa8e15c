"""The transports that one suite of tests runs over."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from tests.multiproc.cluster import LOOPBACK
from tests.rdma.relay import ADDRESS_VARIABLE


@dataclass(frozen=True)
class Transport:
    name: str
    host: str
    """The address that all processes of a test listen at."""
    env: dict[str, str] = field(default_factory=dict)

    @property
    def is_rdma(self) -> bool:
        return self.name != "tcp"

    @property
    def has_data_plane(self) -> bool:
        return self.is_rdma and self.env.get("BYTEPS_RDMA_DATA_PLANE") != "0"


def make(name: str) -> Transport:
    """By its name in TRANSPORTS."""
    if name == "tcp":
        return Transport(name, LOOPBACK)
    host = "fd77::1" if name == "rdma-ipv6" else os.environ.get(ADDRESS_VARIABLE, "10.77.0.1")
    env = {"DMLC_ENABLE_RDMA": "ibverbs", "DMLC_NODE_HOST": host}
    return Transport(name, host, {**env, **VARIANTS[name]})


VARIANTS: dict[str, dict[str, str]] = {
    "rdma": {},
    "rdma-one-plane": {"BYTEPS_RDMA_DATA_PLANE": "0"},
    "rdma-3-endpoints": {"BYTEPS_RDMA_DATA_ENDPOINTS": "3"},
    "rdma-busy-poll": {"BYTEPS_RDMA_BUSY_POLL": "1"},
    # As few as can work: what waits for credit shows here.
    "rdma-shallow": {
        "BYTEPS_RDMA_START_DEPTH": "4",
        "BYTEPS_RDMA_RX_DEPTH": "8",
        "BYTEPS_RDMA_WINDOW_BYTES": "16384",
        "BYTEPS_RDMA_RECEIVE_WINDOW_BYTES": "0",  # one value at a time
    },
    "rdma-ipv6": {},
}
TRANSPORTS = ("tcp", *VARIANTS)
