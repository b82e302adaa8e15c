"""Joining a Ray cluster, or starting one on this machine for one job."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import services

from .settings import Settings

_NODE_S = 30.0
"""For how long it is asked for, each time that Ray does."""
_OBJECT_STORE_BYTES = 100 << 20  # nothing large goes through it


@contextmanager
def cluster(
    settings: Settings,
    *,
    address: str | None = None,
    temp_dir: str | None = None,
    dashboard: bool = False,
    metrics_port: int | None = None,
    gpus: int | None = None,
) -> Iterator[None]:
    """Be a driver of the cluster at ``address`` ("auto": this machine's); None starts one here.

    One that is started here offers as many cores as the job asks for, whatever the machine
    has, and ends with the block.

    Args:
        temp_dir: folder for Ray's sockets and logs; its path must be short. None: Ray's own.
        dashboard: whether to start Ray's dashboard.
        metrics_port: where Prometheus finds the metrics; None: Ray chooses.
        gpus: how many a cluster that is started here offers; None: as many as Ray finds.
    """
    # Ray starts actors with nice 15: whatever else runs here would slow training down.
    os.environ.setdefault("RAY_worker_niceness", "0")
    quiet = {"log_to_driver": False, "logging_level": "warning"}
    if address is not None:
        ray.init(address=address, **quiet)
    else:
        options: dict[str, Any] = {} if temp_dir is None else {"_temp_dir": temp_dir}
        if metrics_port is not None:
            options["_metrics_export_port"] = metrics_port
        actors = settings.ranks + settings.spares * settings.replicas
        cpus = actors * settings.cpus_per_rank + (settings.servers + 1) * settings.server_cpus
        own = {settings.server_resource: settings.servers + 1} if settings.server_resource else None
        _start(
            settings.limits.place,
            num_cpus=math.ceil(cpus),
            num_gpus=gpus,
            resources=own,
            include_dashboard=dashboard,
            _node_ip_address="127.0.0.1",
            object_store_memory=_OBJECT_STORE_BYTES,
            **quiet,
            **options,
        )
    try:
        yield
    finally:
        ray.shutdown()


def _start(limit_s: float, **options: Any) -> None:
    """Start a node here, again if need be.

    Ray gives a node 30 s to start, and the node gives its agents 15 s and ends then. A busy machine
    keeps neither, and there is no setting for them.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            with _patience():
                ray.init(address="local", **options)
            return
        except Exception as error:
            ray.shutdown()
            if "timed out during startup" not in str(error) or time.monotonic() > deadline:
                raise


@contextmanager
def _patience() -> Iterator[None]:
    """Have Ray ask for a node that starts here for longer: it does by this function of its own."""
    ask = services.get_node

    def ask_for_long(*args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + _NODE_S
        while True:
            try:
                return ask(*args, **kwargs)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    services.get_node = ask_for_long
    try:
        yield
    finally:
        services.get_node = ask
