"""What this worker counted, how fast it was, and its settings.

`byteps.torch` re-exports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from byteps.torch import c_lib


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How often something took how long."""

    count: int
    """How often it was seen."""
    sum: float
    """Seconds, all together."""
    buckets: dict[float, int]
    """Upper end of a bucket in seconds -> how often it took at most that."""


class Endpoint(TypedDict):
    """What went by one RDMA connection since the last `init`."""

    peer: str
    """"scheduler" or "server 0"."""
    plane: str
    """"control" or "data"."""
    index: int
    """Among the endpoints of its plane to this peer."""
    messages_sent: int
    bytes_sent: int
    """Of messages, with their values; what the transport says to itself is not counted."""
    messages_received: int
    bytes_received: int
    values_in_place: int
    bytes_in_place: int
    """Of the values received, those that the device wrote into the tensor, or its pinned buffer."""
    values_offered: int
    """Of these, the ones whose place the sender knew from the request, and did not ask for."""
    values_in_pool: int
    bytes_in_pool: int
    """Those that it wrote into memory of the transport's, from which they were copied."""
    values_in_frames: int
    bytes_in_frames: int
    """Those so small that they came in their message's frame."""


class NicTraffic(TypedDict):
    """What this process sent and received by TCP over one NIC."""

    nic: str
    """The interface's name; "lo" for what went to processes of the same host."""
    bytes_sent: int
    """Messages with their values, before encryption."""
    bytes_received: int


def get_metrics() -> dict[str, Any]:
    """What this worker counted since the process began, and what its queues hold now.

    Names and meanings are those of docs/use/observability.md, which Prometheus gets as well: an
    int or a `Histogram` each. "nics" is a list of `NicTraffic`, "rdma_endpoints" one of `Endpoint`,
    empty where TCP is used. Never blocks for long, and works before `init` and after a failure.
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
    """Print every setting in force, one NAME=value a line."""
    print(c_lib.config(), end="")


def setting[T: (bool, float, int, str)](
    name: str, kind: type[T], given: Mapping[str, str] | None = None
) -> T:
    """The value in force of a setting of byteps/base/config_table.cc.

    Args:
        kind: its type in the table.
        given: values that go before the environment's, while this process is in no job.

    Raises:
        BytePSError: a setting has a value that it may not have.
    """
    value = c_lib.setting(name, given or {})
    if type(value) is not kind:
        raise TypeError(f"{name} is of type {type(value).__name__}, not {kind.__name__}")
    return kind(value)


def get_pushpull_speed() -> tuple[int, float]:
    """(ms since the epoch, MB/s of tensors summed over the last 10 s; 0.0 if there were none)."""
    return c_lib.pushpull_speed()
