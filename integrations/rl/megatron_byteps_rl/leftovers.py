"""Shared memory that killed processes left: Ray ends vLLM's by SIGKILL, with no time to tidy up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path("/dev/shm")
_PATTERNS = ("psm_*", "vllm_dist_*", "verl_weights_*")
"""The names that Python, for vLLM, the ranks of a vLLM on a CPU, and verl give it."""


def _mapped() -> Iterator[str]:
    """The files that processes of this machine have in memory now."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            yield from (line.split(None, 5)[-1].rstrip() for line in maps.open(encoding="utf-8"))
        except OSError:  # it ended, or is another user's
            continue


def remove(since: float) -> list[str]:
    """Remove this user's segments that were made after `since` and that no process has mapped.

    Args:
        since: seconds since the epoch.

    Returns:
        Their names.
    """
    found = [file for pattern in _PATTERNS for file in _FOLDER.glob(pattern)]
    mapped = set(_mapped()) if found else set()
    removed = []
    for file in found:
        try:
            status = file.stat()
            if status.st_uid != os.getuid() or status.st_ctime < since or str(file) in mapped:
                continue
            file.unlink()
        except FileNotFoundError:
            continue
        removed.append(file.name)
    return sorted(removed)
