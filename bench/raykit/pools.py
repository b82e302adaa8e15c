"""A cluster of Ray on this machine, and warm actors in it, for as long as they are used."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_byteps_ray.cluster import cluster
from megatron_byteps_ray.pool import Pool
from megatron_byteps_ray.settings import Settings


@contextmanager
def warm_pool(settings: Settings, *, of_cluster: Settings | None = None) -> Iterator[Pool]:
    """The actors of `settings`, in a cluster of its size, or of that of `of_cluster`."""
    # Ray's sockets need a short path, and its processes may still write there as they end.
    with (
        tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        cluster(of_cluster or settings, temp_dir=folder),
    ):
        pool = Pool(settings)
        try:
            pool.open()
            yield pool
        finally:
            pool.close()
