"""Entry of jobs whose layouts are compared: the training script, with a witness that records it.

Each rank saves a ``layouts.gpt.layout.RankSeen`` in the folder of the variable ``LAYOUTS_SEEN``,
like the results that ``layouts.job.Job`` collects.
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
