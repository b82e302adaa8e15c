"""Fixtures of tests that start a cluster. Tests in other folders import them from here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import warm_python as warm
from tests.multiproc.cluster import START_S, Cluster, Nursery, wait_for_file


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The nursery of the session, so that torch is imported only once."""
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> str:
    """A python that need not import torch (warm_python.py). It ends with the nursery."""
    folder = tmp_path_factory.mktemp("warm")
    path, address = warm.install(folder)
    server = nursery.start(
        "warm python", "warm:serve_address", os.environ, folder, {"address": address}
    )
    wait_for_file(folder / "mark.listens.0", START_S, [server])
    return str(path)


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
