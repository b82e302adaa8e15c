"""torchrun, with an exit status that says whether it was told to end.

    python -m byteps.launcher.leaving TORCHRUN_ARGUMENTS

torchrun starts ranks again that end with another status than 0, also on a machine that is about to
be taken away. So a rank of a replica that has left ends with 0 here, and this program with 143: a
job that is done and a replica that has left are told apart. It also ends with 143 where torchrun
was told to end, and with 130 after Ctrl-C, once its ranks have ended. Otherwise all is as with
torchrun.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

STATUS = 128 + signal.SIGTERM
"""The exit status of a process that has left after SIGTERM."""
_FILE = "MEGATRON_BYTEPS_LEFT_FILE"
"""Names a file that ranks make when they leave."""


def status() -> int:
    """This rank leaves: the exit status that it is to end with."""
    file = os.environ.get(_FILE)
    if not file:
        return STATUS
    Path(file).touch()
    return 0


def main(arguments: Sequence[str]) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException

    told: signal.Signals | None = None
    with tempfile.TemporaryDirectory(prefix="byteps-left-") as folder:
        file = Path(folder) / "left"
        os.environ[_FILE] = str(file)
        try:
            run.main(list(arguments))
        except SignalException as error:
            told = signal.Signals(error.sigval)
        except BaseException:
            if not file.exists():
                raise
        if file.exists():
            print(
                "byteps: this replica was told to end (SIGTERM), and has left the others",
                flush=True,
            )
            return STATUS
    if told is None:
        return 0
    print(f"byteps: torchrun was told to end ({told.name}), and its ranks have ended", flush=True)
    return 128 + told


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
