#!/usr/bin/env python3
"""Runs megatron_byteps_ray.profiling of this checkout with any Python from 3.12 on: see its -h."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "integrations" / "ray"

if __name__ == "__main__":
    command = [sys.executable, "-m", "megatron_byteps_ray.profiling", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": str(PACKAGE)})
