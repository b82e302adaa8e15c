"""Metrics and settings of this worker. `byteps.torch` re-exports these functions.

`byteps.torch` re-exports this module's functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from byteps.torch import c_lib


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Distribution of durations."""

    count: int
    """Number of observations."""
    sum: float
    """Total, in seconds."""
    buckets: dict[float, int]
    """Number of observations of at most this duration, by upper bound in seconds."""


class Endpoint(TypedDict):
    """Traffic of an RDMA connection since the last `init`."""

    peer: str
    """"scheduler" or "server 0"."""
    plane: str
    """"control" or "data"."""
    index: int
    """Index among the endpoints of this plane that lead to this peer."""
    messages_sent: int
    bytes_sent: int
    """Bytes of messages and their values, without the transport's own control traffic."""
    messages_received: int
    bytes_received: int
    values_in_place: int
    bytes_in_place: int
    """Received values that the device wrote directly into the tensor or its pinned buffer."""
    values_offered: int
    """Values written in place because the request had told the sender their address."""
    values_in_pool: int
    bytes_in_pool: int
    """Received values that the device wrote into memory of the transport, then copied."""
    values_in_frames: int
    bytes_in_frames: int
    """Values small enough to arrive in their message's frame."""


class NicTraffic(TypedDict):
    """TCP traffic of this process over one NIC."""

    nic: str
    """Interface name; "lo" for traffic to processes of the same host."""
    bytes_sent: int
    """Bytes of messages and their values, before encryption."""
    bytes_received: int


def get_metrics() -> dict[str, Any]:
    """Return this worker's counters since the start of the process, and the current length of its
    queues.

    Names and meanings are in docs/use/observability.md, and are the same in Prometheus. Each value
    is an int or a `Histogram`. "nics" is a list of `NicTraffic`, "rdma_endpoints" a list of
    `Endpoint`, empty with TCP. Never blocks for long, and works before `init` and after a failure.
    """
    metrics: dict[str, Any] = {"nics": c_lib.nics(), "rdma_endpoints": c_lib.endpoints()}
    for name, value in c_lib.metrics().items():
        if isinstance(value, tuple):
            bounds, cumulative, count, total = value
            buckets = dict(zip(bounds, cumulative, strict=True))
            metrics[name] = Histogram(count=count, sum=total, buckets=buckets)
        else:
            metrics[name] = value
    return metrics


def print_config() -> None:
    """Print every setting in force, one NAME=value per line."""
    print(c_lib.config(), end="")


def setting[T: (bool, float, int, str)](
    name: str, kind: type[T], given: Mapping[str, str] | None = None
) -> T:
    """Return the value in force of a setting of byteps/base/config_table.cc.

    Args:
        kind: type of the setting in the table.
        given: values that override the environment's while this process is in no job.

    Raises:
        BytePSError: a setting has an invalid value.
    """
    value = c_lib.setting(name, given or {})
    if type(value) is not kind:
        raise TypeError(f"{name} is of type {type(value).__name__}, not {kind.__name__}")
    return kind(value)


def get_pushpull_speed() -> tuple[int, float]:
    """Return (ms since the epoch, MB/s of tensors that were summed in the last 10 s, or 0.0)."""
    return c_lib.pushpull_speed()
