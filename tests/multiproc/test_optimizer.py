"""Upstream's DistributedOptimizer and broadcasts, which stay in the wheel, and what does not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
from cluster import Cluster


@pytest.mark.parametrize("program", ["distributed", "clipped", "state"])
@pytest.mark.parametrize("workers", [2, 4])
def test_on_the_cpu(make_cluster: Callable[..., Cluster], workers: int, program: str) -> None:
    cluster = make_cluster(workers=workers, servers=1, env={"BYTEPS_OP_TIMEOUT_S": "20"})
    cluster.run(f"optimizer:{program}")


@pytest.mark.parametrize("name", ["cross_barrier", "parallel"])
def test_what_nothing_tries_is_not_installed(name: str) -> None:
    assert importlib.util.find_spec(f"byteps.torch.{name}") is None
