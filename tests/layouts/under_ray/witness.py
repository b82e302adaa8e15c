"""The training script under the eyes of a witness: the entry of jobs whose layouts are compared.

Each rank leaves what it saw, a ``layouts.gpt.seen.RankSeen``, in the folder that ``LAYOUTS_SEEN``
names: the counterpart of the results that ``layouts.job.Job`` collects.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tests.layouts.gpt.rank import run

from ..job import take_a_share


def main() -> None:
    take_a_share()
    seen = run(sys.argv[1:])
    torch.save(seen, Path(os.environ["LAYOUTS_SEEN"]) / f"rank{os.environ['RANK']}.pt")
