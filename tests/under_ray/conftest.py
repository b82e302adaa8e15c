"""Tests under Ray: a cluster with one node and a pool of warm actors for the whole session.

Only `make test-ray` runs them, in build/venv-ray.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.ray_failures.cases import Runner, cluster_settings, pool_settings
from megatron_byteps_ray.cluster import Pool
from megatron_byteps_ray.settings import Settings
from tests.layouts.under_ray.modes import warm_pool


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings of the pool: two ranks and three spares, a scheduler and a server."""
    return pool_settings(tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="session")
def pool(settings: Settings) -> Iterator[Pool]:
    """Actors that all tests share."""
    with warm_pool(settings, of_cluster=cluster_settings(settings)) as pool:
        yield pool


@pytest.fixture(scope="session")
def runner(pool: Pool, settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Runs jobs on the shared pool."""
    return Runner(pool, settings, tmp_path_factory.mktemp("jobs"))
