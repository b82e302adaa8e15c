"""Runs torchrun, with an exit status that tells whether the ranks were asked to end.

    python -m byteps.launcher.leaving TORCHRUN_ARGUMENTS

A rank leaves when it is told to end, for example because its machine is about to be reclaimed.
torchrun would restart ranks that end with another status than 0. So ranks of a replica that has
left end with status 0, and this program ends with 143: a launcher can tell a replica that has left
from a finished job. This program also ends with 143 if torchrun was told to end, and with 130 after
Ctrl-C, once its ranks have ended. In all other cases it behaves like torchrun.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

STATUS = 128 + signal.SIGTERM
"""Exit status of a process that has left after SIGTERM."""
_FILE = "MEGATRON_BYTEPS_LEFT_FILE"
"""Environment variable with the path of a file that ranks create when they leave."""


def status() -> int:
    """Record that this rank leaves; return the exit status with which it must end."""
    file = os.environ.get(_FILE)
    if not file:
        return STATUS
    Path(file).touch()
    return 0


def main(arguments: Sequence[str]) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException

    received: signal.Signals | None = None
    with tempfile.TemporaryDirectory(prefix="byteps-left-") as folder:
        file = Path(folder) / "left"
        os.environ[_FILE] = str(file)
        try:
            run.main(list(arguments))
        except SignalException as error:
            received = signal.Signals(error.sigval)
        except BaseException:
            if not file.exists():
                raise
        if file.exists():
            print("byteps: this replica got SIGTERM and has left the job", flush=True)
            return STATUS
    if received is None:
        return 0
    print(f"byteps: torchrun got {received.name}, and its ranks have ended", flush=True)
    return 128 + received


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
