"""Pools of actors on this machine: their settings, and a cluster of Ray while one is used."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_byteps_ray.cluster import cluster
from megatron_byteps_ray.pool import Pool
from megatron_byteps_ray.settings import Limits, Settings

from ..platforms import Platform
from .gpus import gpus_to_offer

ROOT = Path(__file__).resolve().parents[3]


def environment_on(platform: Platform) -> dict[str, str]:
    """Of all ranks and servers."""
    return {
        **platform.environment,
        "PYTHONWARNINGS": "ignore",
        # Sums of more than two values have one result, in any order.
        "BYTEPS_DETERMINISTIC": "1",
    }


def settings_on(platform: Platform, folder: Path, **changes: Any) -> Settings:
    """Of a pool whose actors find the patched Megatron."""
    settings: dict[str, Any] = {
        "folder": folder,
        "arguments": platform.arguments,
        "gpus_per_rank": float(platform.shares_devices),
        "environment": environment_on(platform),
        "python_path": (str(ROOT / "build/Megatron-LM"),),
        "limits": Limits(warm=1200.0),
    }
    return Settings(**settings, **changes)


@contextmanager
def warm_pool(settings: Settings, *, of_cluster: Settings | None = None) -> Iterator[Pool]:
    """The actors of `settings`, in a cluster of its size, or of that of `of_cluster`."""
    # Ray's sockets need a short path, and its processes may still write there as they end.
    with (
        tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        cluster(of_cluster or settings, temp_dir=folder, gpus=gpus_to_offer(settings)),
    ):
        pool = Pool(settings)
        try:
            pool.open()
            yield pool
        finally:
            pool.close()
