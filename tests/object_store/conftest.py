"""Tests with object stores: servers of S3 and of Google Cloud Storage in this process.

By `make test-object-store` alone, in build/venv-s3.
"""

from __future__ import annotations
