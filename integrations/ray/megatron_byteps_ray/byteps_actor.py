"""An actor that owns one ``byteps-server`` process, as the scheduler or as a server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from byteps.launcher.children import Child, find_executable

from .rank_actor import node_facts

_GRACE_S = 5.0


class BytePSActor:
    """Owns at most one process. Its methods are called at the same time, each by a thread."""

    def __init__(self, *, folder: str, name: str) -> None:
        self._folder = Path(folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._name = name
        self._child: Child | None = None
        self._starts = 0

    def facts(self) -> dict[str, Any]:
        """See ``node_facts``."""
        return node_facts()

    def start(self, role: str, environment: Mapping[str, str], limit_s: float) -> tuple[str, int]:
        """Start the process; of a scheduler, wait until it listens and return host and port.

        Raises:
            RuntimeError: it does not start, or a scheduler does not listen within ``limit_s``.
        """
        self.stop()
        host = node_facts()["address"]
        values = {**os.environ, **environment, "DMLC_ROLE": role}
        command = [find_executable(), "--role", role, "--die-with-parent"]
        port_file = self._folder / f"{self._name}-{os.getpid()}.port"
        if role == "scheduler":
            values |= {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": "0"}
            command += ["--port-file", str(port_file)]
            port_file.unlink(missing_ok=True)
        log = self._folder / f"{self._name}.log"
        self._starts += 1
        child = self._child = Child(self._name, command, values, log)
        if role != "scheduler":
            return host, 0
        deadline = time.monotonic() + limit_s
        while not port_file.exists():
            if child.wait(time.monotonic() + 0.01) or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the scheduler does not listen: {' / '.join(child.last_lines())}"
                )
        port = int(port_file.read_text().split()[1])
        port_file.unlink()
        return host, port

    def starts(self) -> int:
        """How many processes it has started."""
        return self._starts

    def wait_end(self) -> dict[str, Any]:
        """Wait for the process's end: its exit status (negative for a signal), its last lines."""
        child = self._child
        assert child is not None
        while not child.wait(time.monotonic() + 3600.0):
            pass
        return {"status": child.status, "at": time.time(), "lines": child.last_lines()}

    def signal(self, number: int) -> None:
        """Send the process a signal, as a test of what becomes of the job."""
        if self._child is not None:
            self._child.signal(signal.Signals(number))

    def stop(self) -> None:
        """End the process, if it runs, and wait for that."""
        child = self._child
        if child is None:
            return
        if child.running:
            child.signal(signal.SIGKILL)
            child.wait(time.monotonic() + _GRACE_S)
