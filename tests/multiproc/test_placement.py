"""Servers get equal parts of what a step sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 5, 8])
def test_spread(make_cluster: Callable[..., Cluster], servers: int) -> None:
    make_cluster(workers=1, servers=servers).run("placement:spread", servers=servers)


@pytest.mark.parametrize("name", ["djb2", "sdbm", "built_in", "naive"])
def test_other_hashes(make_cluster: Callable[..., Cluster], name: str) -> None:
    env = {"BYTEPS_KEY_HASH_FN": name}
    make_cluster(workers=1, servers=3, env=env).run("placement:hashed")
