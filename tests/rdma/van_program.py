"""Where van_test is, the program that tries a transport without the engine above it."""

from __future__ import annotations

from pathlib import Path

from compiled import FOLDER, BuildError, build

__all__ = ["PROGRAM", "BuildError", "build_van_test"]

PROGRAM = FOLDER / "van_test"


def build_van_test() -> Path:
    """Compiles what has changed. Raises BuildError."""
    return build("van_test")
