"""Fixtures of the tests that start a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cluster_fixtures import make_cluster, nursery

__all__ = ["make_cluster", "nursery"]
