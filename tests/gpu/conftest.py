"""Fixtures of the GPU tests: clusters from tests/multiproc."""

from __future__ import annotations

from tests.multiproc.conftest import make_cluster

__all__ = ["make_cluster"]
