"""Estimates of the cores and the memory that a row of the forecast needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from byteps.forecast.machines import OTHER_CORES, Machines
from byteps.forecast.rows import Row, add_rate_of
from byteps.forecast.training import FEW_BITS, WIRE_BYTES, Training
from byteps.routing import Network

GIB = 2**30
POOL_BYTES = GIB
"""BYTEPS_RECEIVE_POOL_BYTES of a server process."""
BASE_BYTES = GIB // 4
"""Memory of a server process for code, threads and connections."""
FEEDBACK_BYTES = 2
"""Bytes per value of the rounding losses that a server keeps for int4."""
SERVED_BYTES = {"fp32": 16, "bf16": 14, "fp16": 14, "int8": 18, "int4": 18}
"""Bytes per parameter that servers keep: Adam's state, a gradient, and the parameter as workers
have it. Keys: type in which gradients travel."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Resources that a row needs while it communicates."""

    server_cores: int
    """Cores of a spare machine; 0: there is none."""
    worker_cores: int
    """Cores of a worker's host, for the network and the servers on it."""
    server_bytes: int
    """Memory of a spare machine."""
    worker_bytes: int
    """Memory of the servers on a worker's host."""
    nic_gbps: float
    """Load of a spare machine's NICs in each direction. Without spare machines: load of a worker
    host's NICs."""


def needs_of(training: Training, row: Row, network: Network, machines: Machines) -> Needs:
    """Return the needs of a row that uses servers."""
    servers, seconds = network.servers, row.push_seconds
    busy = machines.busy(servers, row.flow.pushed, row.flow.pulled, add_rate_of(machines, row.wire))
    held = row.flow.pushed * _held(training, row, machines)
    shares, process = servers.shares(), POOL_BYTES + BASE_BYTES
    extra = servers.per_machine if servers.extra else 0
    nic = row.server if servers.extra else row.gradients
    return Needs(
        server_cores=_whole(busy.server / seconds) if extra else 0,
        worker_cores=_whole(busy.host / seconds),
        server_bytes=math.ceil(held * shares.extra + process * extra) if extra else 0,
        worker_bytes=math.ceil(held * shares.beside + process * servers.local),
        nic_gbps=nic / seconds * 8 / 1e9,
    )


def _held(training: Training, row: Row, machines: Machines) -> float:
    """Return the bytes that a server holds per pushed byte: the push as it arrived, its sum in a
    type twice as wide (fp32 for few bits), and the optimizer's state."""
    wire = row.wire or ("bf16" if training.gradient_bytes == 2 else "fp32")
    served = SERVED_BYTES[wire] / WIRE_BYTES[wire] if row.optimizer == "servers" else 0.0
    if machines.backup:  # the copy of another server's state, and the last answer on both sides
        served = 2 * (served + 1) if served else 0.0
    if wire not in FEW_BITS:
        return 3 + served
    feedback = FEEDBACK_BYTES if wire == "int4" and not served else 0
    return 1 + (4 + feedback) / FEW_BITS[wire] + served


def _whole(busy: float) -> int:
    # The subtraction lets no rounding error count as another core.
    return math.ceil(busy - 1e-6) + OTHER_CORES
