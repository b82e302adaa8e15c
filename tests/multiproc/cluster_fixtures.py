"""Fixtures of tests that start a cluster, wherever they lie; see conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Nursery


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """One for the session: its start pays for the import of torch."""
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    yield made
    made.close()


@pytest.fixture
def make_cluster(run_dir: Path, nursery: Nursery) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters, each in a folder of its own, that end with the test."""
    with ExitStack() as stack:
        made = 0

        def make(**settings: Any) -> Cluster:
            nonlocal made
            folder = run_dir / f"cluster{made}"
            made += 1
            return stack.enter_context(Cluster(folder, nursery, **settings))

        yield make
