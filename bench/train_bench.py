#!/usr/bin/env python3
"""Alias of bench/training/run.py: the documented command."""

from __future__ import annotations

import sys

from bench.kit.processes import become_interruptible
from bench.training.run import main

if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
