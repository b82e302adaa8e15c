"""Embedded mode: a scheduler and servers next to the ranks, for a job that names no scheduler.

``bps.init()`` calls :func:`start_if_needed` first. With ``DMLC_PS_ROOT_URI`` set the job joins
that cluster and nothing happens here. Without it, global rank 0 starts the scheduler on a port
that the kernel chooses, local rank 0 of every host starts ``BYTEPS_EMBEDDED_SERVERS`` servers, and
the address travels to every rank through torch.distributed's default store, with a secret that
rank 0 makes unless BYTEPS_SECRET or BYTEPS_SECRET_FILE is set. Rank 0 says so in one line. Where
other settings show that a cluster was meant, nothing is started. ``bps.shutdown()`` calls
:func:`stop` last.

No child outlives its rank: ``--die-with-parent`` makes the kernel end it, also when the rank is
killed. The other ranks are then told which one was lost, and the children remove their logs: these
say no more. Logs are kept where a child has failed by itself. Where everything is killed at once,
nobody is left to remove them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from byteps import logs
from byteps.launcher.meeting import (
    Address,
    Board,
    Ranks,
    Store,
    byteps_error,
    demand_no_cluster,
    integer,
    read_ranks,
    scheduler_host,
    seconds,
)

EXECUTABLE = "byteps-server"
LOG_LINES_SHOWN = 20

_endings = threading.Condition()  # notified whenever a child has ended


def find_executable() -> str:
    """Path of byteps-server: the one of this Python's environment before any on PATH."""
    for folder in (os.path.dirname(sys.executable), sysconfig.get_path("scripts")):
        candidate = os.path.join(folder, EXECUTABLE)
        if os.access(candidate, os.X_OK):
            return candidate
    found = shutil.which(EXECUTABLE)
    if found is None:
        raise byteps_error(
            f"embedded mode starts {EXECUTABLE}, which is neither next to {sys.executable} nor on "
            "PATH: install the byteps wheel into this environment, or set DMLC_PS_ROOT_URI and "
            "DMLC_PS_ROOT_PORT to join a cluster that runs already"
        )
    return found


class Child:
    """One process started here, with a log file of its own.

    A thread of its own starts the process and waits for it. The thread must live as long as the
    process: the kernel's parent-death signal is sent when the *thread* that forked ends, so a child
    started by a short-lived caller's thread would die with that.
    """

    def __init__(
        self, title: str, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        self.title = title
        self.log = log
        self._command = list(command)
        self._env = dict(env)
        self._lock = threading.Lock()  # between reaping the process and signalling it
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        self._expected = False
        self.ended_at = 0.0  # of time.monotonic()
        self._started = threading.Event()
        self._ended = threading.Event()
        threading.Thread(target=self._keep, name=f"byteps-{title}", daemon=True).start()
        self._started.wait()
        if self._failure is not None:
            raise byteps_error(f"cannot start {title} ({self._command[0]}): {self._failure}")

    def _keep(self) -> None:
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C is for the ranks: they leave the cluster, which ends the children.
                    start_new_session=True,
                )
        except OSError as error:
            self._failure = error
            self._ended.set()
            return
        finally:
            self._started.set()
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            status = self._process.wait()
        if status != 0 and not self._expected:
            # Not print(): at interpreter exit a daemon thread must not wait for stderr's lock.
            with contextlib.suppress(OSError):
                os.write(2, self._obituary(status).encode(errors="replace"))
        with _endings:
            self.ended_at = time.monotonic()
            self._ended.set()
            _endings.notify_all()

    def _obituary(self, status: int) -> str:
        what = f"signal {-status}" if status < 0 else f"exit status {status}"
        lines = [f"embedded {self.title} ended with {what}; the end of {self.log}:"]
        lines += [f"  {line}" for line in self.last_lines()]
        return logs.render(logging.ERROR, "\n".join(lines)) + "\n"

    def last_lines(self) -> list[str]:
        try:
            return self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        except OSError:
            return []

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode if self._process is not None else None

    @property
    def failed(self) -> bool:
        """It has ended, neither with status 0 nor by a signal of ours."""
        return not self.running and self.status not in (None, 0) and not self._expected

    def wait(self, deadline: float) -> bool:
        """Whether it ended before `deadline` (of time.monotonic())."""
        return self._ended.wait(max(0.0, deadline - time.monotonic()))

    def signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self._process is not None and self._process.returncode is None:
                self._expected = True
                self._process.send_signal(number)


def wait_all(children: Sequence[Child], deadline: float, grace_s: float) -> None:
    """Wait until all have ended, or the deadline, or ``grace_s`` after one of them has failed."""
    with _endings:
        while any(child.running for child in children):
            failures = [child.ended_at + grace_s for child in children if child.failed]
            left = min([deadline, *failures]) - time.monotonic()
            if left <= 0:
                return
            _endings.wait(left)


REST_S = 5.0
"""How long the rest of a job that failed may take to end by itself."""
GRACE_S = 5.0
"""How long a process may take to end after a signal."""
DEFAULT_SERVERS = 1
MAX_SERVERS = 256
DEFAULT_START_TIMEOUT_S = 30.0
DEFAULT_LEAVE_TIMEOUT_S = 600.0


def _new_secret(env: Mapping[str, str]) -> str:
    """A secret for the job; empty where the environment says which, or that there is none."""
    given = env.get("BYTEPS_SECRET") or env.get("BYTEPS_SECRET_FILE")
    return "" if given or env.get("BYTEPS_AUTH") == "0" else secrets.token_hex(32)


@dataclass
class _Embedded:
    """What one start_if_needed() made, for stop() to undo."""

    pid: int
    rank: int = 0
    folder: Path | None = None
    children: list[Child] = field(default_factory=list)
    saved_environment: dict[str, str | None] = field(default_factory=dict)


_current: _Embedded | None = None


def is_running() -> bool:
    """Whether this process is in a cluster that the embedded mode started."""
    return _current is not None


def stop_at_exit(
    end_children: Callable[[list[tuple[str, int, str]], str, float, float], bool],
) -> bool:
    """At the end of the process have what it started ended as by :func:`stop`, once its exit status
    is known.

    Args:
        end_children: ``c_lib.end_children_at_exit``. Takes title, process and log of each child,
            the folder to remove, what to wait in s, and what after a failure.

    Returns:
        Whether that is arranged, or nothing needs to be; else call :func:`stop`.
    """
    state = _current
    if state is None or not state.children:
        return True
    running = [
        (child.title, child.pid, str(child.log)) for child in state.children if child.running
    ]
    folder = "" if any(child.failed for child in state.children) else str(state.folder)
    return end_children(running, folder, _leave_timeout_s(), REST_S)


def start_if_needed(store: Store | None = None) -> bool:
    """Start this job's scheduler and servers, unless the environment names a scheduler.

    Blocks until the address is known; collective over all ranks. Afterwards DMLC_PS_ROOT_URI,
    DMLC_PS_ROOT_PORT, DMLC_NUM_SERVER and DMLC_NUM_WORKER are set in os.environ. Returns whether
    the embedded mode is on. Raises BytePSError within BYTEPS_START_TIMEOUT_S with the reason, on
    every rank that takes part; what this rank had started is ended then.

    Args:
        store: of torch.distributed; None: its default one, of ranks that have initialised it.
    """
    global _current
    if _current is not None:
        return True
    if os.environ.get("DMLC_PS_ROOT_URI"):
        return False
    ranks = read_ranks(os.environ)
    demand_no_cluster(os.environ, ranks)
    if store is None or ranks.world_size == 1:
        store = _default_store(ranks)
    _current = _Embedded(pid=os.getpid(), rank=ranks.rank)
    try:
        _start(_current, ranks, store)
    except BaseException:
        stop(graceful=False)
        raise
    return True


def _default_store(ranks: Ranks) -> Store | None:
    """torch.distributed's store, which must be there for more than one rank."""
    if ranks.world_size == 1:
        return None
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise byteps_error(
            f"embedded mode with WORLD_SIZE={ranks.world_size} needs torch.distributed: call "
            "torch.distributed.init_process_group() before bps.init(), or set DMLC_PS_ROOT_URI and "
            "DMLC_PS_ROOT_PORT to join a cluster that runs already"
        )
    if (dist.get_rank(), dist.get_world_size()) != (ranks.rank, ranks.world_size):
        raise byteps_error(
            f"torch.distributed says rank {dist.get_rank()} of {dist.get_world_size()}, the "
            f"environment says rank {ranks.rank} of {ranks.world_size}"
        )
    return dist.distributed_c10d._get_default_store()


def _start(state: _Embedded, ranks: Ranks, store: Store | None) -> None:
    timeout_s = seconds(os.environ, "BYTEPS_START_TIMEOUT_S", DEFAULT_START_TIMEOUT_S)
    deadline = time.monotonic() + timeout_s
    servers = 0
    if ranks.local_rank == 0:
        state.folder = Path(tempfile.mkdtemp(prefix="byteps-embedded-"))
    problem: Exception | None = None
    executable = ""
    try:
        if ranks.local_rank == 0:
            wanted = integer(os.environ, "BYTEPS_EMBEDDED_SERVERS", 1, MAX_SERVERS)
            servers = wanted if wanted is not None else DEFAULT_SERVERS
            executable = find_executable()
    except RuntimeError as error:
        problem = error
    if store is None:
        if problem is not None:
            raise problem
        address = _start_scheduler(state, ranks, executable, servers, deadline)
    else:
        board = Board.open(store, ranks, timeout_s, deadline)
        board.report(servers, problem)
        if ranks.rank == 0:
            board.publish(
                lambda total: _start_scheduler(state, ranks, executable, total, deadline), deadline
            )
        address = board.address(deadline)
    environment = address.environment(ranks)
    for number in range(servers):
        # After the workers of this host, so that all have metrics at ports of their own.
        local = {"BYTEPS_LOCAL_RANK": str(ranks.local_world_size + number)}
        _start_child(state, f"server {number}", executable, "server", {**environment, **local})
    state.saved_environment = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)


def _start_child(
    state: _Embedded,
    title: str,
    executable: str,
    role: str,
    environment: Mapping[str, str],
    arguments: Sequence[str] = (),
) -> Child:
    assert state.folder is not None
    log = state.folder / f"{title.replace(' ', '-')}.log"
    options = ("--role", role, f"--die-with-parent=worker {state.rank}", "--log", str(log))
    child = Child(
        title,
        [executable, *options, *arguments],
        {**os.environ, **environment, "DMLC_ROLE": role},
        log,
    )
    state.children.append(child)
    return child


def _start_scheduler(
    state: _Embedded, ranks: Ranks, executable: str, servers: int, deadline: float
) -> Address:
    """Start the scheduler and wait until it listens."""
    assert state.folder is not None
    host = scheduler_host(os.environ, ranks)
    port_file = state.folder / "scheduler.port"
    asked = Address(host=host, port=0, servers=servers, secret=_new_secret(os.environ))
    scheduler = _start_child(
        state,
        "scheduler",
        executable,
        "scheduler",
        asked.environment(ranks),
        ["--port-file", str(port_file)],
    )
    while not port_file.exists():
        if scheduler.wait(min(deadline, time.monotonic() + 0.01)):
            raise byteps_error(
                f"the embedded scheduler ended with status {scheduler.status} before it listened: "
                + " / ".join(scheduler.last_lines())
            )
        if time.monotonic() >= deadline:
            raise byteps_error(
                "the embedded scheduler did not listen in time (BYTEPS_START_TIMEOUT_S): "
                + " / ".join(scheduler.last_lines())
            )
    port = int(port_file.read_text().split()[1])
    port_file.unlink()
    # Not by a logger: at its default level it says nothing, and who lost an address must see this.
    sys.stderr.write(
        logs.render(
            logging.INFO,
            f"embedded mode (DMLC_PS_ROOT_URI is not set): this rank has started the scheduler at "
            f"{host}:{port}, and the first rank of each host starts its servers, {servers} in all; "
            f"their logs are in {state.folder}",
        )
        + "\n"
    )
    return replace(asked, port=port)


def stop(graceful: bool = True, timeout_s: float | None = None) -> None:
    """End what start_if_needed() started here and put the environment back; without it, do nothing.

    Call it after this rank left the cluster. Scheduler and servers end by themselves, with status
    0, once every worker left; `graceful` waits for that, up to `timeout_s` (default
    BYTEPS_OP_TIMEOUT_S: a rank that is still at work needs them). It waits no longer than 5 s once
    one of them has failed, or when this process ends by an exception: other ranks may hang until
    it has ended. Then, or at once when not `graceful`, they are terminated and, 5 s later, killed.
    The logs stay only when a child failed.
    """
    global _current
    state, _current = _current, None
    if state is None or state.pid != os.getpid():  # a forked copy owns nothing
        return
    for name, value in state.saved_environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        if graceful:
            if timeout_s is None:
                timeout_s = _leave_timeout_s()
            wait_all(state.children, time.monotonic() + timeout_s, REST_S)
    finally:  # an interrupt ends the waiting, not the ending
        for number in (signal.SIGTERM, signal.SIGKILL):
            left = [child for child in state.children if child.running]
            for child in left:
                child.signal(number)
            wait_all(left, time.monotonic() + GRACE_S, GRACE_S)
        if state.folder is not None and not any(child.failed for child in state.children):
            shutil.rmtree(state.folder, ignore_errors=True)


def _leave_timeout_s() -> float:
    # Set by the interpreter for an exception that nobody caught; at a prompt, life goes on.
    dying = getattr(sys, "last_exc", None) is not None and not hasattr(sys, "ps1")
    if dying:
        return REST_S
    try:
        return seconds(os.environ, "BYTEPS_OP_TIMEOUT_S", DEFAULT_LEAVE_TIMEOUT_S)
    except RuntimeError:  # set to junk since init: no reason not to end
        return DEFAULT_LEAVE_TIMEOUT_S
