"""Replicas that step by themselves, and exchange parameters once in many steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.multiproc.cluster import Cluster


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_steps_are_those_of_torch(make_cluster: Callable[..., Cluster], workers: int) -> None:
    make_cluster(workers=workers, servers=2).run("diloco:equals_torch")


def test_fragments(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1).run("diloco:fragments")


def test_members_stay_alike(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=3, servers=2).run("diloco:momentum_keeps_members_alike")


def test_refusals(make_cluster: Callable[..., Cluster]) -> None:
    make_cluster(workers=2, servers=1).run("diloco:refused")
