"""Embedded mode: a scheduler and servers beside the ranks, for a job that names no scheduler.

``bps.init()`` calls :func:`start_if_needed` first. With ``DMLC_PS_ROOT_URI`` set the job joins
that cluster and nothing happens here. Without it, global rank 0 starts the scheduler on a port that
the kernel chooses, local rank 0 of every host starts ``BYTEPS_EMBEDDED_SERVERS`` servers, and the
address travels to every rank through torch.distributed's default store, with a secret that rank 0
makes unless BYTEPS_SECRET or BYTEPS_SECRET_FILE is set. ``bps.shutdown()`` calls :func:`stop` last.

No child outlives its rank: ``--die-with-parent`` makes the kernel end it, also when the rank is
killed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from byteps import logs

EXECUTABLE = "byteps-server"
LOOPBACK = "127.0.0.1"
LOG_LINES_SHOWN = 20
GRACE_S = 5.0
DEFAULT_SERVERS = 1
MAX_SERVERS = 256
DEFAULT_START_TIMEOUT_S = 30.0
DEFAULT_LEAVE_TIMEOUT_S = 600.0


class Store(Protocol):
    """The part of torch.distributed's key-value store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Where this process stands in the job, as its launcher says."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def single_host(self) -> bool:
        return self.world_size == self.local_world_size


@dataclass(frozen=True, kw_only=True)
class Address:
    """What every rank must know to join the cluster."""

    host: str
    port: int
    servers: int
    secret: str
    """Empty: the environment has one, or the job goes without."""

    def environment(self, ranks: Ranks) -> dict[str, str]:
        plain = {
            "DMLC_PS_ROOT_URI": self.host,
            "DMLC_PS_ROOT_PORT": str(self.port),
            "DMLC_NUM_SERVER": str(self.servers),
            "DMLC_NUM_WORKER": str(ranks.world_size),
        }
        return {**plain, "BYTEPS_SECRET": self.secret} if self.secret else plain


def _error(text: str) -> RuntimeError:
    """The package's own error where it is importable: this module also loads without the engine."""
    try:
        from byteps.torch import BytePSError
    except ImportError:
        return RuntimeError(text)
    return BytePSError(text)


def _integer(env: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
        raise _error(f"{name}={text!r} is not a whole number from {low} to {high}")
    return int(text)


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e9:
        raise _error(f"{name}={text!r} is not a positive number of seconds")
    return value


def read_ranks(env: Mapping[str, str]) -> Ranks:
    """Rank and size from RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them.

    DMLC_WORKER_ID and DMLC_NUM_WORKER stand in for the first two. A process with none of them is
    the only one of its job. Raises BytePSError for a value that cannot be, or a partial set.
    """
    big = 1 << 20
    world = _integer(env, "WORLD_SIZE", 1, big)
    dmlc_world = _integer(env, "DMLC_NUM_WORKER", 1, big)
    if world is not None and dmlc_world is not None and world != dmlc_world:
        raise _error(f"WORLD_SIZE={world} and DMLC_NUM_WORKER={dmlc_world} disagree")
    size = world if world is not None else dmlc_world
    if size is None or size == 1:
        return Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)
    rank = _integer(env, "RANK", 0, size - 1)
    if rank is None:
        rank = _integer(env, "DMLC_WORKER_ID", 0, size - 1)
    local_rank = _integer(env, "LOCAL_RANK", 0, size - 1)
    local_world = _integer(env, "LOCAL_WORLD_SIZE", 1, size)
    if rank is None or local_rank is None or local_world is None:
        raise _error(
            f"embedded mode with {size} workers needs RANK, LOCAL_RANK and LOCAL_WORLD_SIZE: start "
            "the job with torchrun, or set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT to join a cluster"
        )
    return Ranks(rank=rank, world_size=size, local_rank=local_rank, local_world_size=local_world)


def find_executable() -> str:
    """Path of byteps-server: the one of this Python's environment before any on PATH."""
    for folder in (os.path.dirname(sys.executable), sysconfig.get_path("scripts")):
        candidate = os.path.join(folder, EXECUTABLE)
        if os.access(candidate, os.X_OK):
            return candidate
    found = shutil.which(EXECUTABLE)
    if found is None:
        raise _error(
            f"embedded mode starts {EXECUTABLE}, which is neither beside {sys.executable} nor on "
            "PATH: install the byteps wheel into this environment, or set DMLC_PS_ROOT_URI and "
            "DMLC_PS_ROOT_PORT to join a cluster that runs already"
        )
    return found


def _new_secret(env: Mapping[str, str]) -> str:
    """A secret for the job; empty where the environment says which, or that there is none."""
    given = env.get("BYTEPS_SECRET") or env.get("BYTEPS_SECRET_FILE")
    return "" if given or env.get("BYTEPS_AUTH") == "0" else secrets.token_hex(32)


def _interface_address(name: str) -> str:
    import fcntl
    import struct

    get_interface_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), get_interface_address, request)
        except OSError as error:
            raise _error(f"DMLC_INTERFACE={name!r} has no IPv4 address: {error}") from error
    return socket.inet_ntoa(answer[20:24])


def _address_towards(host: str) -> str:
    """The local address that packets to `host` leave from (no packet is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise _error(f"embedded mode: no way to MASTER_ADDR={host!r}: {error}") from error
        return probe.getsockname()[0]


def scheduler_host(env: Mapping[str, str], ranks: Ranks) -> str:
    """The address of this host at which every rank of the job reaches it.

    Loopback for a job on one host. Otherwise DMLC_NODE_HOST, the address of DMLC_INTERFACE, or the
    address of the interface that MASTER_ADDR is reached by. Raises BytePSError when that is
    loopback though MASTER_ADDR was not given as such: a hosts file that maps the host's own name to
    127.0.1.1 would hand the other hosts an address that is their own.
    """
    if ranks.single_host:
        return LOOPBACK
    if env.get("DMLC_NODE_HOST"):
        return env["DMLC_NODE_HOST"]
    if env.get("DMLC_INTERFACE"):
        return _interface_address(env["DMLC_INTERFACE"])
    master = env.get("MASTER_ADDR")
    if not master:
        raise _error(
            "embedded mode on several hosts needs MASTER_ADDR, DMLC_NODE_HOST or DMLC_INTERFACE to "
            "know at which address the others reach the scheduler"
        )
    address = _address_towards(master)
    if ipaddress.ip_address(address).is_loopback and not _says_loopback(master):
        raise _error(
            f"embedded mode: MASTER_ADDR={master!r} means {address} on its own host, where the "
            "others cannot reach it: set DMLC_NODE_HOST or DMLC_INTERFACE"
        )
    return address


def _says_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_endings = threading.Condition()  # notified whenever a child has ended


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
            raise _error(f"cannot start {title} ({self._command[0]}): {self._failure}")

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


@dataclass
class _Embedded:
    """What one start_if_needed() made, for stop() to undo."""

    pid: int
    folder: Path | None = None
    children: list[Child] = field(default_factory=list)
    saved_environment: dict[str, str | None] = field(default_factory=dict)


_current: _Embedded | None = None
_generation = 0  # of the store's keys: init after shutdown must not read the old address
_last_store: Store | None = None  # another store knows nothing of what was said in the last one


def is_running() -> bool:
    """Whether this process is in a cluster that the embedded mode started."""
    return _current is not None


def start_if_needed() -> bool:
    """Start this job's scheduler and servers, unless the environment names a scheduler.

    Blocks until the address is known; collective over all ranks. Afterwards DMLC_PS_ROOT_URI,
    DMLC_PS_ROOT_PORT, DMLC_NUM_SERVER and DMLC_NUM_WORKER are set in os.environ. Returns whether
    the embedded mode is on. Raises BytePSError within BYTEPS_START_TIMEOUT_S with the reason, on
    every rank that takes part; what this rank had started is ended then.
    """
    global _current, _generation, _last_store
    if _current is not None:
        return True
    if os.environ.get("DMLC_PS_ROOT_URI"):
        return False
    ranks = read_ranks(os.environ)
    store = _default_store(ranks)
    # Ranks that were there before and ranks that are new agree on the number: after a failure their
    # process groups, and so their store, are new to all of them.
    _generation = _generation + 1 if store is _last_store else 0
    _last_store = store
    prefix = f"byteps-embedded/{_generation}"
    _current = _Embedded(pid=os.getpid())
    try:
        _start(_current, ranks, store, prefix)
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
        raise _error(
            f"embedded mode with WORLD_SIZE={ranks.world_size} needs torch.distributed: call "
            "torch.distributed.init_process_group() before bps.init(), or set DMLC_PS_ROOT_URI and "
            "DMLC_PS_ROOT_PORT to join a cluster that runs already"
        )
    if (dist.get_rank(), dist.get_world_size()) != (ranks.rank, ranks.world_size):
        raise _error(
            f"torch.distributed says rank {dist.get_rank()} of {dist.get_world_size()}, the "
            f"environment says rank {ranks.rank} of {ranks.world_size}"
        )
    return dist.distributed_c10d._get_default_store()


def _start(state: _Embedded, ranks: Ranks, store: Store | None, prefix: str) -> None:
    timeout_s = _seconds(os.environ, "BYTEPS_START_TIMEOUT_S", DEFAULT_START_TIMEOUT_S)
    deadline = time.monotonic() + timeout_s
    servers = 0
    if ranks.local_rank == 0:
        state.folder = Path(tempfile.mkdtemp(prefix="byteps-embedded-"))
    problem: Exception | None = None
    executable = ""
    try:
        if ranks.local_rank == 0:
            wanted = _integer(os.environ, "BYTEPS_EMBEDDED_SERVERS", 1, MAX_SERVERS)
            servers = wanted if wanted is not None else DEFAULT_SERVERS
            executable = find_executable()
    except RuntimeError as error:
        problem = error
    if store is None:
        if problem is not None:
            raise problem
        address = _start_scheduler(state, ranks, executable, servers, deadline)
    else:
        board = _Board(store=store, prefix=prefix, ranks=ranks, timeout_s=timeout_s)
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
    child = Child(
        title,
        [executable, "--role", role, "--die-with-parent", *arguments],
        {**os.environ, **environment, "DMLC_ROLE": role},
        state.folder / f"{title.replace(' ', '-')}.log",
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
            raise _error(
                f"the embedded scheduler ended with status {scheduler.status} before it listened: "
                + " / ".join(scheduler.last_lines())
            )
        if time.monotonic() >= deadline:
            raise _error(
                "the embedded scheduler did not listen in time (BYTEPS_START_TIMEOUT_S): "
                + " / ".join(scheduler.last_lines())
            )
    port = int(port_file.read_text().split()[1])
    port_file.unlink()
    return replace(asked, port=port)


@dataclass(frozen=True, kw_only=True)
class _Board:
    """The ranks' agreement on one address, through the store.

    Each rank reports how many servers it will start (or why it cannot); rank 0 adds them up, starts
    the scheduler for that many and publishes its address (or the reason why there is none, so that
    every rank fails at once, with the cause).
    """

    store: Store
    prefix: str
    ranks: Ranks
    timeout_s: float

    def _rank_key(self, rank: int) -> str:
        return f"{self.prefix}/rank/{rank}"

    @property
    def _address_key(self) -> str:
        return f"{self.prefix}/address"

    def report(self, servers: int, problem: Exception | None) -> None:
        entry: dict[str, int | str] = {"servers": servers}
        if problem is not None:
            entry["error"] = str(problem)
        self.store.set(self._rank_key(self.ranks.rank), json.dumps(entry))

    def publish(self, start: Callable[[int], Address], deadline: float) -> None:
        """On rank 0: `start` makes the scheduler for the number of servers that it is given."""
        try:
            address = start(self._count_servers(deadline))
        except Exception as error:
            self.store.set(self._address_key, json.dumps({"error": str(error)}))
            raise
        self.store.set(self._address_key, json.dumps(vars(address)))

    def _count_servers(self, deadline: float) -> int:
        keys = [self._rank_key(rank) for rank in range(self.ranks.world_size)]
        if not self._wait(keys, deadline):
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise _error(
                f"embedded mode: ranks {missing} of {self.ranks.world_size} did not call "
                f"bps.init() within {self.timeout_s:g} s (BYTEPS_START_TIMEOUT_S), or have "
                "DMLC_PS_ROOT_URI set"
            )
        entries = [json.loads(self.store.get(key)) for key in keys]
        for rank, entry in enumerate(entries):
            if "error" in entry:
                raise _error(f"embedded mode, rank {rank}: {entry['error']}")
        return sum(entry["servers"] for entry in entries)

    def address(self, deadline: float) -> Address:
        # Rank 0 gives up at its own deadline and publishes that; leave it the time to.
        if not self._wait([self._address_key], deadline + 2.0):
            raise _error(
                f"embedded mode: rank 0 did not publish the scheduler's address within "
                f"{self.timeout_s:g} s (BYTEPS_START_TIMEOUT_S): did it call bps.init(), with "
                "DMLC_PS_ROOT_URI unset?"
            )
        entry = json.loads(self.store.get(self._address_key))
        if "error" in entry:
            raise _error(f"embedded mode, rank 0: {entry['error']}")
        return Address(**entry)

    def _wait(self, keys: list[str], deadline: float) -> bool:
        left = max(0.001, deadline - time.monotonic())
        try:
            self.store.wait(keys, timedelta(seconds=left))
        except RuntimeError as error:  # DistStoreError is one
            if time.monotonic() >= deadline - 0.05:
                return False
            raise _error(f"embedded mode: torch.distributed's store failed: {error}") from error
        return True


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
            _wait_all(state.children, time.monotonic() + timeout_s)
    finally:  # an interrupt ends the waiting, not the ending
        for number in (signal.SIGTERM, signal.SIGKILL):
            left = [child for child in state.children if child.running]
            for child in left:
                child.signal(number)
            _wait_all(left, time.monotonic() + GRACE_S)
        if state.folder is not None and not any(child.failed for child in state.children):
            shutil.rmtree(state.folder, ignore_errors=True)


def _leave_timeout_s() -> float:
    # Set by the interpreter for an exception that nobody caught; at a prompt, life goes on.
    dying = getattr(sys, "last_exc", None) is not None and not hasattr(sys, "ps1")
    if dying:
        return GRACE_S
    try:
        return _seconds(os.environ, "BYTEPS_OP_TIMEOUT_S", DEFAULT_LEAVE_TIMEOUT_S)
    except RuntimeError:  # set to junk since init: no reason not to end
        return DEFAULT_LEAVE_TIMEOUT_S


def _wait_all(children: Sequence[Child], deadline: float) -> None:
    """Wait until all have ended, or the deadline, or a while after one of them has failed."""
    with _endings:
        while any(child.running for child in children):
            failures = [child.ended_at + GRACE_S for child in children if child.failed]
            left = min([deadline, *failures]) - time.monotonic()
            if left <= 0:
                return
            _endings.wait(left)
