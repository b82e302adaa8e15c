"""Fixtures of the tests on GPUs: clusters, as tests/multiproc has them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "multiproc"))

from cluster_fixtures import make_cluster, nursery

__all__ = ["make_cluster", "nursery"]
