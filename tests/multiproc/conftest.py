"""Fixtures of tests that start a cluster. Tests in other folders import them from here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cluster import Cluster, Nursery


@contextmanager
def cluster_maker(folder: Path, nursery: Nursery) -> Iterator[Callable[..., Cluster]]:
    """Create clusters, each in its own folder, that end with the context."""
    with ExitStack() as stack:
        made = 0

        def make(**settings: Any) -> Cluster:
            nonlocal made
            own = folder / f"cluster{made}"
            made += 1
            return stack.enter_context(Cluster(own, nursery, **settings))

        yield make


@pytest.fixture
def make_cluster(run_dir: Path, nursery: Nursery) -> Iterator[Callable[..., Cluster]]:
    """Create clusters that end with the test."""
    with cluster_maker(run_dir, nursery) as make:
        yield make
