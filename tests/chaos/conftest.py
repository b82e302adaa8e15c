"""Makes the chaos script importable."""

from __future__ import annotations
