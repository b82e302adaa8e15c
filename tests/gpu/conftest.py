"""Fixtures of the tests on GPUs: clusters, as tests/multiproc has them."""

from __future__ import annotations

from tests.multiproc.conftest import make_cluster, nursery

__all__ = ["make_cluster", "nursery"]
