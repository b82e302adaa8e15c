"""A program with tests that hang, end their rank, and pass, in which the runner must continue."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time

import torch.distributed as dist

from tests.pytorch import runner


def main() -> int:
    """Run the tests; standard output gets a JSON line for each."""
    options = argparse.Namespace(backend="gloo", ranks=2, per_host=1, wire="same", stand_in=False)
    runner.prepare(options)
    case = runner.case_of(_Odd)
    for name, limit_s in (("test_hangs", 30.0), ("test_kills", 100.0), ("test_passes", 100.0)):
        print(json.dumps(runner.run_test(case, name, options, limit_s)), flush=True)
    return 0


class _Odd:
    rank: int

    def test_hangs(self) -> None:
        if self.rank == 1:
            child = os.fork()
            if child:
                print("child", child, flush=True)
            time.sleep(1000)

    def test_kills(self) -> None:
        if self.rank == 1:
            print("the last word", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def test_passes(self) -> None:
        dist.barrier()


if __name__ == "__main__":
    sys.exit(main())
