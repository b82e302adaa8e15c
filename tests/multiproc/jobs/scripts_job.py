"""What worker.sh runs in the tests of the shell scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import byteps.torch as bps
import torch


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    bps.init()
    want = float(sum(range(1, bps.size() + 1)))
    for round_ in range(5):
        given = torch.full((100_000,), float(bps.rank() + 1 + round_))
        total = bps.push_pull(given, average=False, name="weight")
        if not (total == want + round_ * bps.size()).all():
            raise SystemExit(f"wrong sum {total[0]}")
    print(f"rank {bps.rank()} of {bps.size()}: sums are right", flush=True)
    (folder / f"ready.{bps.rank()}").touch()
    while mode == "forever":
        bps.push_pull(torch.ones(1000), average=False, name="loop")
    bps.shutdown()


if __name__ == "__main__":
    main()
