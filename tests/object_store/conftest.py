"""Tests with object stores: servers of S3 and of Google Cloud Storage in this process.

By `make test-object-store` alone, in build/venv-s3.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("scripts", "integrations/ray")]
