"""The processes of a launch: what fails or is late ends all, and says why."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from bench.kit.emulation import Host
from bench.kit.errors import LaunchError
from scripts import children
from scripts.children import LAUNCHER_VARIABLES, Spawned, end_all, last_lines

_GRACE_S = 5.0
_POLL_S = 0.02
_LOG_LINES = 30
# Of every job that this process launches.
_SECRET = secrets.token_hex(32)


def server_executable() -> str:
    """byteps-server, next to this Python or on PATH. Raises LaunchError."""
    try:
        return children.server_executable()
    except FileNotFoundError as error:
        raise LaunchError(str(error)) from None


def plain_environment() -> dict[str, str]:
    """This process's environment without anything that says which job a process belongs to.

    Settings of the engine (BYTEPS_...) stay, so that they can be compared.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(("DMLC_", "TORCHELASTIC_"))
    }
    if not kept.keys() & {"BYTEPS_SECRET", "BYTEPS_SECRET_FILE", "BYTEPS_AUTH"}:
        kept["BYTEPS_SECRET"] = _SECRET
    # One thread each: on an emulated cluster many processes share few cores.
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Processes:
    """What one launch started; a context manager that ends whatever still runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[Spawned] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end_all(self._started, _GRACE_S)

    def start(
        self, title: str, command: Sequence[str], host: Host, environment: Mapping[str, str]
    ) -> int:
        """Start a process on a host; return its pid. It ends when this one does."""
        process = Spawned(title, host.command(command), environment, self.folder)
        self._started.append(process)
        return process.pid

    def text_of(self, title: str) -> str:
        """All that a process has printed by now."""
        (process,) = (one for one in self._started if one.title == title)
        return process.text

    def kill(self, title: str) -> None:
        """End a process by SIGKILL. It is no failure that it ended so."""
        (process,) = (one for one in self._started if one.title == title)
        self._started.remove(process)
        process.kill()

    def wait_file(self, path: Path, timeout_s: float) -> str:
        """The content of a file that one of the processes is about to write."""
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            self._demand_well()
            if time.monotonic() > deadline:
                raise LaunchError(f"{path.name} was not written in {timeout_s:g} s\n{self.logs()}")
            time.sleep(_POLL_S)
        return path.read_text()

    def wait_all(self, timeout_s: float) -> None:
        """Wait for the end of every process. Raises LaunchError when one fails or is late."""
        deadline = time.monotonic() + timeout_s
        while late := [process.title for process in self._started if process.running]:
            self._demand_well()
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{', '.join(late)} still ran after {timeout_s:g} s (--timeout)\n{self.logs()}"
                )
            time.sleep(_POLL_S)
        self._demand_well()

    def _demand_well(self) -> None:
        failed = {process.title: process.status for process in self._started if process.status}
        if failed:
            time.sleep(1.0)  # the others notice, and say why
            raise LaunchError(f"exit status {failed}\n{self.logs()}")

    def logs(self) -> str:
        """The last lines of every log that is not empty."""
        parts = []
        for process in self._started:
            if lines := last_lines(process.log, _LOG_LINES):
                parts += [f"---- last lines of {process.title}", lines]
        return "\n".join(parts)
