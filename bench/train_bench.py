#!/usr/bin/env python3
"""The command that is documented as bench/train_bench.py: see bench/training/run.py."""

from __future__ import annotations

import sys

from bench.kit.processes import become_interruptible
from bench.training.run import main

if __name__ == "__main__":
    become_interruptible()
    sys.exit(main())
