"""Child processes: each with a log, waited for with a deadline, ended by its pid.

Whatever this project starts and waits for, it starts by this: training, benchmarks, tests.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from scripts.progress import end_with_parent

LAUNCHER_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)
"""What torchrun tells a worker, in addition to TORCHELASTIC_..."""


class Late(AssertionError):
    """Something did not happen by its deadline; the text has the last lines of the logs."""


def server_executable() -> str:
    """byteps-server, next to this Python or on PATH. Raises FileNotFoundError."""
    beside = Path(sys.executable).parent / "byteps-server"
    found = str(beside) if beside.exists() else shutil.which("byteps-server")
    if found is None:
        raise FileNotFoundError(
            f"byteps-server is neither next to {sys.executable} nor on PATH: run `make setup`"
        )
    return found


def last_lines(log: Path, lines: int = 15) -> str:
    """The end of a log."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"


class Spawned:
    """A child of this process; it ends when this one does.

    Args:
        title: what it is, for messages; its log is ``folder``'s file of this name, with no spaces.
        command: its words.
        env: its whole environment.
        folder: for its log, and where it runs unless ``cwd`` says otherwise.
    """

    def __init__(
        self,
        title: str,
        command: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        *,
        cwd: Path | None = None,
    ) -> None:
        self.title = title
        self.log = folder / f"{title.replace(' ', '-')}.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                list(command),
                env=dict(env),
                cwd=cwd or folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C comes to this process alone, which ends its children.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Its exit status, -n when signal n ended it; None while it runs."""
        return self._process.poll()

    @property
    def text(self) -> str:
        """What it has written."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Its exit status. Raises Late."""
        try:
            return self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            raise Late(
                f"{self.title} still runs after {timeout_s:g} s:\n{last_lines(self.log)}"
            ) from None

    def send(self, number: signal.Signals) -> None:
        """Nothing, where it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it by force, and what it has started in its session; wait for it."""
        if self.running:
            os.killpg(self.pid, signal.SIGKILL)  # the session was made for it
        self._process.wait()


def end_all(processes: Iterable[Spawned], grace_s: float) -> None:
    """Ask all to end, and end by force what still runs after ``grace_s``."""
    asked = list(processes)
    for process in asked:
        process.send(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for process in asked:
        try:
            process.wait(deadline - time.monotonic())
        except Late:
            process.kill()
