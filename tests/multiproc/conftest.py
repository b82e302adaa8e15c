"""Fixtures of the tests that start a cluster."""

from __future__ import annotations

from tests.multiproc.cluster_fixtures import make_cluster, nursery

__all__ = ["make_cluster", "nursery"]
