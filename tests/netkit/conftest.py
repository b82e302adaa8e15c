"""The tests of networks that lose, delay or cut packets use the programs of a cluster's tests."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "multiproc")]
