"""Child processes, and the ports and GPUs that they get.

Whatever this project starts and waits for, it starts by this: training, benchmarks, tests. Each
child has a log, is waited for with a deadline, and ended by its pid.
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
"""What torchrun tells a worker, in addition to TORCHELASTIC_..."""


class Late(AssertionError):
    """Something did not happen by its deadline; the text has the last lines of the logs."""


def captured(
    command: Sequence[str | Path],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command; returns its status, whatever it is, and what it prints."""
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


def free_ports(count: int = 1, host: str = LOOPBACK) -> int:
    """The first of ``count`` ports in a row that nobody listens at, at this address of the machine.

    None of those that the kernel gives on a request for any port: a node of the job itself might
    get it before the one that it is for.
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
    """Whether so many ranks share GPUs of this machine. NCCL refuses that to ranks of a machine."""
    return 0 < count_gpus() < ranks


def place_among(number: int, per_machine: int) -> dict[str, str]:
    """Variables of a rank, of which so many have a GPU each. Those are a machine to NCCL, which
    lets no two ranks of a machine share a GPU."""
    machine, local = divmod(number, per_machine)
    return {"LOCAL_RANK": str(local), "NCCL_HOSTID": f"machine{machine}"}


def some_gpus(first: int, count: int) -> str:
    """``count`` GPUs of this machine from the ``first`` one on and around, by
    CUDA_VISIBLE_DEVICES."""
    gpus = _gpus()
    return ",".join(gpus[(first + i) % len(gpus)] for i in range(count))


def count_gpus() -> int:
    """Number of GPUs that may be used: none where CUDA_VISIBLE_DEVICES is empty."""
    return len(_gpus())


def _gpus() -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [gpu for gpu in given.split(",") if gpu]
    if not any(GPUS_OF_DRIVER.glob("*")):
        return []
    import torch  # here, because most of those who start processes need none of it

    # The driver may know GPUs that this container does not have. CUDA does not start by this.
    return [str(i) for i in range(torch.cuda.device_count())]
