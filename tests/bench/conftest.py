"""Makes the benchmark's tools and the tests' own helpers importable."""

from __future__ import annotations
