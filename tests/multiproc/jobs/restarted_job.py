"""A training script as torchrun starts it, again and again: see programs/keep.py."""

from __future__ import annotations

import os
from pathlib import Path

from tests.multiproc.programs import keep

if __name__ == "__main__":
    keep.train(Path(os.environ["JOB_FOLDER"]), {"steps": 60, "dies_at": 20})
