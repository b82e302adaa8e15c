"""The processes of a launch: each with a log, waited for with a deadline, ended by its pid."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from benchkit.emulation import Host
from orphans import end_with_parent

_GRACE_S = 5.0
_POLL_S = 0.02
_LOG_LINES = 30
_JOB_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
}
# Of every job that this process launches.
_SECRET = secrets.token_hex(32)


class LaunchError(Exception):
    """A launch did not end well; the text has the ends of its logs."""


def server_executable() -> str:
    """byteps-server, beside this Python or on PATH. Raises LaunchError."""
    beside = Path(sys.executable).parent / "byteps-server"
    found = str(beside) if beside.exists() else shutil.which("byteps-server")
    if found is None:
        raise LaunchError(
            f"byteps-server is neither beside {sys.executable} nor on PATH: run `make setup`"
        )
    return found


def plain_environment() -> dict[str, str]:
    """This process's environment without anything that says which job a process belongs to.

    Settings of the engine (BYTEPS_...) stay, so that they can be compared.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _JOB_VARIABLES and not name.startswith(("DMLC_", "TORCHELASTIC_"))
    }
    if not kept.keys() & {"BYTEPS_SECRET", "BYTEPS_SECRET_FILE", "BYTEPS_AUTH"}:
        kept["BYTEPS_SECRET"] = _SECRET
    # One thread each: on an emulated cluster many processes share few cores.
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Processes:
    """What one launch started; a context manager that ends whatever still runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
            deadline = time.monotonic() + _GRACE_S
            for process in self._running.values():
                if process.poll() is None:
                    end(process)
            for process in self._running.values():
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue

    def start(
        self, title: str, command: Sequence[str], host: Host, environment: Mapping[str, str]
    ) -> int:
        """Start a process on a host; return its pid. It ends when this one does."""
        with self._log(title).open("wb") as log:
            process = subprocess.Popen(
                host.command(command),
                env=dict(environment),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C comes to the benchmark alone, which ends the others.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self._running[title] = process
        return process.pid

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
        while any(process.poll() is None for process in self._running.values()):
            self._demand_well()
            if time.monotonic() > deadline:
                late = [title for title, p in self._running.items() if p.poll() is None]
                raise LaunchError(
                    f"{', '.join(late)} still ran after {timeout_s:g} s (--timeout)\n{self.logs()}"
                )
            time.sleep(_POLL_S)
        self._demand_well()

    def _demand_well(self) -> None:
        failed = {title: p.returncode for title, p in self._running.items() if p.poll()}
        if failed:
            time.sleep(1.0)  # the others notice, and say why
            raise LaunchError(f"exit status {failed}\n{self.logs()}")

    def _log(self, title: str) -> Path:
        return self.folder / f"{title}.log"

    def logs(self) -> str:
        """The last lines of every log that is not empty."""
        parts = []
        for title in self._running:
            lines = self._log(title).read_text(errors="replace").splitlines()
            if lines:
                parts += [f"---- last lines of {title}", *lines[-_LOG_LINES:]]
        return "\n".join(parts)
