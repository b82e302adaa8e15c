"""Child processes, and the ports and GPUs that they get.

Training, benchmarks and tests start all their processes with this module. Each child has a log, is
waited for with a deadline, and is ended by its process id.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from scripts.progress import end_with_parent

LOOPBACK = "127.0.0.1"
GPUS_OF_DRIVER = Path("/proc/driver/nvidia/gpus")
LAUNCHER_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)
"""Variables that torchrun sets for a worker. Those named TORCHELASTIC_... are left out."""


class Late(AssertionError):
    """Error of an event that missed its deadline. The text has the last lines of the logs."""


def captured(
    command: Sequence[str | Path],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command; return its status and output."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env=env,
        cwd=cwd,
    )


def python_of_ranks() -> str:
    """Return the Python of ranks: as for torchrun, ``PYTHON_EXEC`` or this one."""
    return os.environ.get("PYTHON_EXEC", sys.executable)


def server_executable() -> str:
    """Return the path of byteps-server: next to this Python, or on PATH. Raises
    FileNotFoundError."""
    installed = Path(sys.executable).parent / "byteps-server"
    executable = str(installed) if installed.exists() else shutil.which("byteps-server")
    if executable is None:
        raise FileNotFoundError(
            f"byteps-server is neither next to {sys.executable} nor on PATH: run `make setup`"
        )
    return executable


def last_lines(log: Path, lines: int = 15) -> str:
    """Return the last lines of a log."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"


class Spawned:
    """Child process that ends when this process ends.

    Args:
        title: name for messages. The log is a file of this name in ``folder``, without spaces.
        command: words of the command.
        env: complete environment of the child.
        folder: folder of its log, and its working directory unless ``cwd`` is given.
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
                # In a session of its own, the child does not get Ctrl-C. This process gets it, and
                # ends its children.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Exit status. -n if signal n ended the process; None while it is running."""
        return self._process.poll()

    @property
    def text(self) -> str:
        """Output of the process so far."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Wait for the exit status. Raises Late."""
        try:
            return self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            raise Late(
                f"{self.title} still runs after {timeout_s:g} s:\n{last_lines(self.log)}"
            ) from None

    def send(self, number: signal.Signals) -> None:
        """Send a signal; do nothing if the process has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and all processes in its session. Wait until it has ended."""
        if self.running:
            os.killpg(self.pid, signal.SIGKILL)  # the session was created for this child
        self._process.wait()


def end_all(processes: Iterable[Spawned], grace_s: float) -> None:
    """Send SIGTERM to all. After ``grace_s`` seconds, kill those that still run."""
    ending = list(processes)
    for process in ending:
        process.send(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for process in ending:
        try:
            process.wait(deadline - time.monotonic())
        except Late:
            process.kill()


def free_ports(count: int = 1, host: str = LOOPBACK) -> int:
    """Return the first of ``count`` consecutive free ports on this address of the machine.

    The ports are outside the kernel's ephemeral range: another node of the job might get a port of
    that range first.
    """
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8")
    lowest = int(given.split()[0])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        port = random.randrange(min(10_000, lowest // 2), lowest - count)
        try:
            for number in range(port, port + count):
                socket.create_server((host, number), family=family).close()
        except OSError:
            continue
        return port


def outnumbered(ranks: int) -> bool:
    """Return whether this many ranks must share this machine's GPUs. NCCL refuses that for ranks of
    the same host."""
    return 0 < count_gpus() < ranks


def place_among(number: int, per_machine: int) -> dict[str, str]:
    """Return the variables of rank ``number`` if ``per_machine`` ranks have a GPU each. NCCL takes
    such a set of ranks for a host, because it does not let two ranks of a host share a GPU."""
    machine, local = divmod(number, per_machine)
    return {"LOCAL_RANK": str(local), "NCCL_HOSTID": f"machine{machine}"}


def some_gpus(first: int, count: int) -> str:
    """Return ``count`` GPUs of this machine, beginning at ``first`` and wrapping around, for
    CUDA_VISIBLE_DEVICES."""
    gpus = _gpus()
    return ",".join(gpus[(first + i) % len(gpus)] for i in range(count))


def count_gpus() -> int:
    """Return the number of usable GPUs; 0 if CUDA_VISIBLE_DEVICES is empty."""
    return len(_gpus())


def _gpus() -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [gpu for gpu in given.split(",") if gpu]
    if not any(GPUS_OF_DRIVER.glob("*")):
        return []
    import torch  # imported here, because most programs that start processes do not need torch

    # The driver may know GPUs that this container lacks. torch counts the visible ones, without
    # starting CUDA.
    return [str(i) for i in range(torch.cuda.device_count())]
