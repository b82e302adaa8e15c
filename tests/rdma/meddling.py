"""Builds meddle.cc, which breaks RDMA inside a process of a test."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.native import FOLDER, BuildError

SOURCE = Path(__file__).parent / "meddle.cc"
OVERLAY = SOURCE.parents[2] / "byteps"
PS_LITE = SOURCE.parents[2] / "build/byteps/3rdparty/ps-lite/include"
SOURCES = [SOURCE, OVERLAY / "byteps/net/rdma/wire.cc"]
LIBRARY = FOLDER / "meddle.so"
"""To preload. It does nothing to a process whose environment does not ask for it."""


def build_meddle() -> Path:
    """Compiles the library. Raises BuildError."""
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    part = LIBRARY.with_suffix(".part")
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    command += [f"-I{OVERLAY}", "-isystem", str(PS_LITE), *map(str, SOURCES), "-o", str(part)]
    # What it asks for by name alone, a linker may take for not needed.
    command += ["-Wl,--no-as-needed", "-ldl", "-libverbs", "-lrdmacm"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if ended.returncode != 0:
        raise BuildError(f"{SOURCE.name} does not compile:\n{ended.stderr}")
    part.rename(LIBRARY)
    return LIBRARY
