"""A rank of the soak under torchrun, which restarts it. Each start records its own steps."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    entry, folder, *arguments = sys.argv[1:]
    record = Path(folder) / f"life-{os.environ['TORCHELASTIC_RESTART_COUNT']}.jsonl"
    sys.argv = [entry, *arguments, "--record-steps", str(record)]
    runpy.run_path(entry, run_name="__main__")
