"""Tests with an object store: an S3 server in this process.

By `make test-s3` alone, in build/venv-s3.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("scripts", "bench", "integrations/ray")]
