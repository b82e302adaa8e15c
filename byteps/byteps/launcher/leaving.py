"""torchrun for a replica that may be told to end, and leaves a job that goes on without it.

    python -m byteps.launcher.leaving TORCHRUN_ARGUMENTS

torchrun starts ranks again that end with another status than 0, also on a machine that is about to
be taken away. So a rank that has left ends with 0 here, and this program with 143: a job that is
done and a replica that has left are told apart. Otherwise all is as with torchrun.
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

    with tempfile.TemporaryDirectory(prefix="byteps-left-") as folder:
        file = Path(folder) / "left"
        os.environ[_FILE] = str(file)
        try:
            run.main(list(arguments))
        except BaseException:  # torchrun raises what SIGTERM at itself has made it do
            if not file.exists():
                raise
        if not file.exists():
            return 0
    print("byteps: this replica was told to end (SIGTERM), and has left the others", flush=True)
    return STATUS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
