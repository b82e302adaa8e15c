"""Megatron's entry script with a minimum time per step, PACE_S seconds.

Replicas that share a machine's cores then step as fast as on separate machines, if these cores have
time left. With STEPS_FILE a step waits until the number in that file exceeds the step's.

    PYTHONPATH=TREE PACE_S=1.5 python bench/replicas/paced_gpt.py TREE/SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any


def paced(step: Any, seconds: float) -> Any:
    """Wrap a forward and backward pass so that it takes at least `seconds`."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        await_turn()
        due = time.monotonic() + seconds
        try:
            return step(*args, **kwargs)
        finally:
            time.sleep(max(0.0, due - time.monotonic()))

    return wrapped


def await_turn() -> None:
    """Wait until this step may be made."""
    if "STEPS_FILE" not in os.environ:
        return
    from megatron.training import get_args

    allowed = Path(os.environ["STEPS_FILE"])
    while get_args().curr_iteration >= int(allowed.read_text() or 0):
        time.sleep(0.01)


def main() -> None:
    script = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    from megatron.training import training

    # The minimum time of a pass includes its computing. Later waits add to it.
    compute = training.get_forward_backward_func

    def get(*args: Any, **kwargs: Any) -> Any:
        return paced(compute(*args, **kwargs), float(os.environ["PACE_S"]))

    training.get_forward_backward_func = get
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
