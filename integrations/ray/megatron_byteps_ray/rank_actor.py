"""Actors that own a rank's process, or a ``byteps-server`` process."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import hashlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from byteps.launcher.child import Child, find_executable, port_of

from .rank_program import STACKS_SIGNAL
from .settings import free_port, gpu_numbers, is_slice

LINES_SHOWN = 30
_STACKS_S = 1.0
_GRACE_S = 5.0


def node_facts() -> dict[str, Any]:
    """Return this actor's node, address, host and process, and its GPUs by Ray's names."""
    import ray

    return {
        "node": ray.get_runtime_context().get_node_id(),
        "address": ray.util.get_node_ip_address(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "gpus": ray.get_runtime_context().get_accelerator_ids().get("GPU", []),
    }


def last_lines(log: Path, count: int = LINES_SHOWN) -> list[str]:
    """Return the last lines of a log; empty if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - (1 << 16)))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


class RankActor:
    """Owns at most one rank's process, which this machine's fork server creates.

    Several threads call its methods concurrently, because some methods block.
    """

    def __init__(
        self,
        *,
        folder: str,
        preload: Sequence[str],
        python_path: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self._folder = Path(folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._changed = threading.Condition()
        self._warm = False
        self._broken = ""
        self._status: int | None = None
        self._ended_at = 0.0
        self._pid = 0
        self._running = False
        self._log = self._folder / "fork-server.log"
        self._news: dict[str, Any] = {}
        self._steps: collections.deque[dict[str, Any]] = collections.deque(maxlen=10_000)
        self._facts = self._find_place(environment)
        self._connection = self._connect(preload, python_path, environment)
        threading.Thread(target=self._listen, name="fork server", daemon=True).start()

    def _find_place(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """Return facts about the machine and the device of this actor (see ``facts``)."""
        facts = node_facts()
        given = facts["gpus"]
        mask = environment.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
        try:
            gpus = gpu_numbers(given, mask)
        except ValueError as error:
            gpus, self._broken = [], str(error)
        return {**facts, "gpus": gpus, "slice": is_slice(given)}

    def _connect(
        self, preload: Sequence[str], python_path: Sequence[str], environment: Mapping[str, str]
    ) -> socket.socket:
        """Connect to this machine's fork server. Start it if necessary."""
        folders = [*python_path, os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, **environment}
        environment["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
        # Ray disables bytecode files for its workers. Without them every process here would compile
        # all modules.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        # An import that counts GPUs must not start CUDA, because CUDA cannot be forked.
        environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        facts = self._facts
        modules = []
        for module in preload:
            forked = not facts["gpus"] or module == "torch"
            modules += ["--preload" if forked else "--import", module]
        # Actors of a job on the same machine with the same imports share a fork server.
        key = [facts["node"], str(self._folder), sys.executable, *modules, *python_path]
        name = hashlib.sha256("\n".join(key).encode()).hexdigest()[:24]
        path = _private_folder() / f"{name}.sock"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                command = [sys.executable, "-m", "megatron_byteps_ray.fork_server", str(path)]
                with self._log.open("ab") as log:
                    subprocess.run(
                        [*command, *modules],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment,
                        check=True,
                    )
                connection.connect(str(path))
        return connection

    def _listen(self) -> None:
        with self._connection.makefile("rb") as messages, contextlib.suppress(ConnectionError):
            for line in messages:
                message = json.loads(line)
                with self._changed:
                    self._take(message)
                    self._changed.notify_all()
        with self._changed:
            self._broken = self._broken or "the fork server ended"
            self._end(-int(signal.SIGKILL), time.time())
            self._changed.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "warm":
            self._warm = True
        elif kind == "failed":
            self._broken = message["text"]
        elif kind == "started":
            self._pid = message["pid"]
        elif kind == "ended":
            self._end(message["status"], message["time"])
        elif kind == "beat":
            self._news.update(beat=time.monotonic(), pushed=message["pushed"])
        elif kind == "mark":
            self._news.setdefault("marks", {}).setdefault(message["mark"], message["time"])
            self._news.update(doing=message["mark"], changed=time.monotonic())
        elif kind == "step":
            self._steps.append(message)
            self._news.update(step=message["step"], doing="step", changed=time.monotonic())

    def _end(self, status: int, at: float) -> None:
        if self._running:
            self._running, self._status, self._ended_at = False, status, at

    def facts(self) -> dict[str, Any]:
        """Return ``node_facts`` and ``places``; ``gpus`` are CUDA's numbers."""
        return self._facts

    def warm(self, limit_s: float) -> str:
        """Wait until everything is imported. Return an empty text, or the reason of a failure."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._warm or self._broken, limit_s):
                return f"not done within {limit_s:g} s"
            if self._warm and not self._broken:
                return ""
            return "\n".join([self._broken, *last_lines(self._log)])

    def free_port(self) -> int:
        """Return a port of this machine on which no process listens."""
        return free_port()

    def start(self, order: dict[str, Any]) -> None:
        """Start the rank; see ``fork_server``."""
        with self._changed:
            if self._running:
                raise RuntimeError("this actor already runs a rank")
            if self._broken:
                raise RuntimeError(f"this actor can start no rank: {self._broken}")
            self._log = Path(order["log"])
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._running, self._status, self._pid = True, None, 0
            self._news, now = {}, time.monotonic()
            self._news.update(beat=now, changed=now, doing="start", step=0, pushed=0, marks={})
            self._steps.clear()
            self._order({"order": "start", **order})

    def _order(self, order: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # The listening thread notices its end.
            self._connection.sendall(json.dumps(order).encode() + b"\n")

    def wait_end(self) -> dict[str, Any]:
        """Wait for the rank's end. Return its exit status (negative for a signal), the time, and
        the last log lines."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
            return {
                "status": self._status,
                "at": self._ended_at,
                "lines": last_lines(self._log),
            }

    def progress(self) -> dict[str, Any]:
        """Return the rank's progress: its steps since the last call, and the time of its
        silence."""
        with self._changed:
            steps, now = list(self._steps), time.monotonic()
            self._steps.clear()
            news = dict(self._news)
            return {
                "pid": self._pid,
                "running": self._running,
                "step": news.get("step", 0),
                "pushed": news.get("pushed", 0),
                "doing": news.get("doing", ""),
                "marks": dict(news.get("marks", {})),
                "silent_s": now - news.get("beat", now),
                "unchanged_s": now - news.get("changed", now),
                "steps": steps,
            }

    def stacks(self) -> list[str]:
        """Make the rank write the stacks of its threads to its log. Return the log's last lines."""
        self._order({"order": "signal", "number": int(STACKS_SIGNAL)})
        time.sleep(_STACKS_S)
        return last_lines(self._log)

    def tell_to_end(self) -> None:
        """Ask the rank to end, because its machine is being drained. A rank of a replica leaves
        after its step."""
        self._order({"order": "tell", "number": int(signal.SIGTERM)})

    def stop(self) -> None:
        """End the rank if it is running, and wait for its end."""
        with self._changed:
            if not self._running:
                return
            self._order({"order": "signal", "number": int(signal.SIGKILL)})
            self._changed.wait_for(lambda: not self._running)


def _private_folder() -> Path:
    """Return a folder for sockets that only this user can access."""
    folder = Path(tempfile.gettempdir()) / f"megatron-byteps-ray-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode) or facts.st_mode & 0o077:
        raise RuntimeError(f"{folder} is not a folder that only this user may use: remove it")
    return folder


class BytePSActor:
    """Owns at most one process, a scheduler or a server.

    Several threads call its methods concurrently.
    """

    def __init__(self, *, folder: str, name: str) -> None:
        self._folder = Path(folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._name = name
        self._child: Child | None = None
        self._starts = 0

    def facts(self) -> dict[str, Any]:
        """Return ``node_facts``."""
        return node_facts()

    def start(self, role: str, environment: Mapping[str, str], limit_s: float) -> tuple[str, int]:
        """Start the process. For a scheduler, wait until it listens, and return its host and port.

        Raises:
            RuntimeError: the process does not start, or a scheduler does not listen within
                ``limit_s``.
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
        return host, port_of(child, port_file, time.monotonic() + limit_s)

    def starts(self) -> int:
        """Return the number of processes started so far."""
        return self._starts

    def wait_end(self) -> dict[str, Any]:
        """Wait for the process's end. Return its exit status (negative for a signal) and last log
        lines."""
        child = self._child
        assert child is not None
        while not child.wait(time.monotonic() + 3600.0):
            pass
        return {"status": child.status, "at": time.time(), "lines": child.last_lines()}

    def signal(self, number: int) -> None:
        """Send the process a signal. Tests of failures use this."""
        if self._child is not None:
            self._child.signal(signal.Signals(number))

    def stop(self) -> None:
        """End the process if it is running, and wait for its end."""
        child = self._child
        if child is None:
            return
        if child.running:
            child.signal(signal.SIGKILL)
            child.wait(time.monotonic() + _GRACE_S)
