"""Builds meddle.cc, which breaks RDMA inside a process of a test."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "meddle.cc"
INCLUDES = SOURCE.parents[2] / "byteps/3rdparty/ps-lite/src"


def build(folder: Path) -> Path:
    """The library to preload."""
    library = folder / "meddle.so"
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    command += [f"-I{INCLUDES}", str(SOURCE), "-o", str(library), "-ldl", "-libverbs"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    return library
