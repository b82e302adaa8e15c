"""Embedded mode: a scheduler and servers next to the ranks, for a job that names no scheduler.

``bps.init()`` calls :func:`start_if_needed` first. With ``DMLC_PS_ROOT_URI`` set the job joins
that cluster and nothing happens here. Without it, global rank 0 starts the scheduler on a port
that the kernel chooses, local rank 0 of every host starts ``BYTEPS_EMBEDDED_SERVERS`` servers, and
the address travels to every rank through torch.distributed's default store, with a secret that
rank 0 makes unless BYTEPS_SECRET or BYTEPS_SECRET_FILE is set. Rank 0 says so in one line. Where
other settings show that a cluster was meant, nothing is started. ``bps.shutdown()`` calls
:func:`leave` last, or :func:`stop` after a failure.

Children serve the other ranks until these have left, and no child outlives its rank: that waits for
them when its process ends. ``--die-with-parent`` makes the kernel end it, also when the rank is
killed. The other ranks are then told which one was lost, and the children remove their logs: these
say no more. Logs are kept where a child has failed by itself. Where everything is killed at once,
nobody is left to remove them.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from byteps import logs
from byteps.launcher.addresses import scheduler_host
from byteps.launcher.child import Child, wait_all
from byteps.launcher.meeting import Board, Message, Store
from byteps.launcher.places import (
    LocalPlace,
    Ranks,
    byteps_error,
    find_locals,
    host_name,
    integer,
    read_ranks,
    seconds,
)

EXECUTABLE = "byteps-server"


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


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address and secret with which a rank joins the cluster."""

    host: str
    port: int
    servers: int
    secret: str
    """Empty: the environment has one, or the job goes without."""

    def environment(self, ranks: int) -> dict[str, str]:
        plain = {
            "DMLC_PS_ROOT_URI": self.host,
            "DMLC_PS_ROOT_PORT": str(self.port),
            "DMLC_NUM_SERVER": str(self.servers),
            "DMLC_NUM_WORKER": str(ranks),
        }
        return {**plain, "BYTEPS_SECRET": self.secret} if self.secret else plain


@dataclass
class _Embedded:
    """Processes and variables of one start_if_needed(), to be undone."""

    pid: int
    rank: int = 0
    folder: Path | None = None
    children: list[Child] = field(default_factory=list)
    saved_environment: dict[str, str | None] = field(default_factory=dict)

    def make_folder(self) -> Path:
        """The folder of the children's logs."""
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="byteps-embedded-"))
        return self.folder

    def forget_address(self) -> None:
        for name, value in self.saved_environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.saved_environment = {}

    def remove_logs(self) -> None:
        """Unless a child has failed, which they explain."""
        if self.folder is not None and not any(child.failed for child in self.children):
            shutil.rmtree(self.folder, ignore_errors=True)

    def outlive(self) -> None:
        """Wait until all children have ended, however long that takes."""
        wait_all(self.children, math.inf, math.inf)
        self.remove_logs()

    def end(self, deadline: float) -> None:
        """Wait for the children until `deadline`, of time.monotonic(); end those that are left."""
        try:
            wait_all(self.children, deadline, REST_S)
        finally:  # an interrupt ends the waiting, not the ending
            for number in (signal.SIGTERM, signal.SIGKILL):
                left = [child for child in self.children if child.running]
                for child in left:
                    child.signal(number)
                wait_all(left, time.monotonic() + GRACE_S, GRACE_S)
            self.remove_logs()


_current: _Embedded | None = None
_left: list[_Embedded] = []
"""Starts whose jobs this rank has left, and other ranks may not have."""

EndChildren = Callable[[list[tuple[str, int, str]], str, float, float], bool]
"""``c_lib.end_children_at_exit``. Takes title, process and log of each child, the folder to remove,
what to wait in s, and what after a failure."""


def is_running() -> bool:
    """Whether this process is in a cluster that the embedded mode started."""
    return _current is not None


def stop_at_exit(end_children: EndChildren, *, left: bool = False) -> bool:
    """At the end of the process have what it started ended as by :func:`stop`, once its exit status
    is known.

    Args:
        left: instead of the present job's children those of jobs that this rank has left.

    Returns:
        Whether that is arranged, or nothing needs to be; else call :func:`stop`, or
        :func:`stop_left`.
    """
    states = _left if left else [_current] if _current is not None else []
    arranged = [_arrange(end_children, state) for state in states]  # each of them
    return all(arranged)


def _arrange(end_children: EndChildren, state: _Embedded) -> bool:
    running = [
        (child.title, child.pid, str(child.log)) for child in state.children if child.running
    ]
    if not running or state.pid != os.getpid():
        return True
    folder = "" if any(child.failed for child in state.children) else str(state.folder)
    return end_children(running, folder, _leave_timeout_s(), REST_S)


def start_if_needed(
    given: tuple[int, int] | None = None, store: Store | None = None
) -> Ranks | None:
    """Start this job's scheduler and servers, unless the environment names a scheduler.

    Blocks until the address is known; collective over all ranks. Afterwards DMLC_PS_ROOT_URI,
    DMLC_PS_ROOT_PORT, DMLC_NUM_SERVER and DMLC_NUM_WORKER are set in os.environ. Raises BytePSError
    within BYTEPS_START_TIMEOUT_S with the reason, on every rank that takes part; what this rank had
    started is ended then.

    Args:
        given: rank and size of this process in torch.distributed; None: those of the environment.
        store: of torch.distributed, for more than one rank.

    Returns:
        Where this process stands, if the ranks had to find out; None: the environment says it.
    """
    global _current
    joins = bool(os.environ.get("DMLC_PS_ROOT_URI"))
    if _current is not None or (joins and given is None):
        return None
    rank, size = given or read_ranks(os.environ)
    place = LocalPlace.own(os.environ, host_name(os.environ.get("BYTEPS_HOST_ID", "")))
    if not joins:
        demand_no_cluster(os.environ, size, place.local[1] if place.local else size)
    if size > 1 and store is None:
        raise byteps_error(
            f"embedded mode with WORLD_SIZE={size} needs torch.distributed: call "
            "torch.distributed.init_process_group() before bps.init(), or set DMLC_PS_ROOT_URI and "
            "DMLC_PS_ROOT_PORT to join a cluster that runs already"
        )
    if joins:
        return _Start(rank, size, store).find(place)
    _current = _Embedded(pid=os.getpid(), rank=rank)
    try:
        return _Start(rank, size, store, _current).find(place)
    except BaseException:
        stop(graceful=False)
        raise


def demand_no_cluster(env: Mapping[str, str], size: int, here: int) -> None:
    """For a job that names no scheduler. Raises BytePSError where it was meant to name one.

    What only a cluster needs is set, or the ranks are on several hosts and nobody said how many
    servers each of these is to start. DMLC_NUM_WORKER alone may stand in for WORLD_SIZE.

    Args:
        size: ranks of the job.
        here: those on this host.
    """
    names = ["DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER"]
    if "WORLD_SIZE" in env:
        names.append("DMLC_NUM_WORKER")
    if env.get("BYTEPS_REPLICA"):  # all replicas join one scheduler
        names.append("BYTEPS_REPLICA")
    given = [f"{name}={env[name]}" for name in names if name in env]
    be = "is" if len(given) == 1 else "are"
    unset = "unset" if "DMLC_PS_ROOT_URI" not in env else "empty"
    if given:
        raise byteps_error(
            f"DMLC_PS_ROOT_URI is {unset}, but {' and '.join(given)} {be} set: set "
            "DMLC_PS_ROOT_URI to the scheduler's address to join a cluster, or unset the others to "
            "have a scheduler and servers started next to the ranks (embedded mode)"
        )
    if here < size and "BYTEPS_EMBEDDED_SERVERS" not in env:
        raise byteps_error(
            f"DMLC_PS_ROOT_URI is {unset}, and WORLD_SIZE={size} is more than this host's {here} "
            "ranks: set BYTEPS_EMBEDDED_SERVERS=1 on every host to start one server next to the "
            "ranks of each (embedded mode), or DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT and "
            "DMLC_NUM_SERVER to join a cluster"
        )


class _Start:
    """The ranks' agreement on where each stands and, in embedded mode, on the scheduler's address.

    Each rank tells its host and how many servers it would start (or why it cannot). Rank 0 finds
    every rank's place, adds up the servers of the first ranks of all hosts, starts the scheduler
    for that many, and answers.
    """

    def __init__(
        self, rank: int, size: int, store: Store | None, state: _Embedded | None = None
    ) -> None:
        """
        Args:
            state: takes what is started; None: the job joins a cluster.
        """
        timeout_s = seconds(os.environ, "BYTEPS_START_TIMEOUT_S", DEFAULT_START_TIMEOUT_S)
        self._deadline = time.monotonic() + timeout_s
        self._rank, self._size, self._state = rank, size, state
        self._board: Board | None = None
        if store is not None and size > 1:
            self._board = Board(
                store=store, rank=rank, size=size, timeout_s=timeout_s, deadline=self._deadline
            )
        self._executable = ""

    def find(self, place: LocalPlace) -> Ranks:
        """Where this process stands. Its host's servers are started with its first rank."""
        servers, problem = 0, ""
        try:
            if self._state is not None:
                wanted = integer(os.environ, "BYTEPS_EMBEDDED_SERVERS", 1, MAX_SERVERS)
                servers = DEFAULT_SERVERS if wanted is None else wanted
                self._executable = find_executable()
        except RuntimeError as error:
            if self._board is None:
                raise
            problem = str(error)
        starts = self._state is not None
        mine = {"place": asdict(place), "starts": starts, "servers": servers, "problem": problem}
        if self._board is None:
            [answer] = self._answers([mine])
        else:
            answer = self._board.ask(mine, self._answers)
        local_rank, local_size = answer["local"]
        ranks = Ranks(
            rank=self._rank,
            world_size=self._size,
            local_rank=local_rank,
            local_world_size=local_size,
        )
        if self._state is not None:
            self._join(self._state, ranks, Address(**answer["address"]), servers)
        return ranks

    def _answers(self, told: list[Message]) -> list[Message]:
        """On rank 0: of each rank's place, and the scheduler that it starts."""
        for rank, one in enumerate(told):
            if one["problem"]:
                raise byteps_error(f"embedded mode, rank {rank}: {one['problem']}")
        joining = [rank for rank, one in enumerate(told) if not one["starts"]]
        if 0 < len(joining) < len(told):
            raise byteps_error(
                f"DMLC_PS_ROOT_URI is set on ranks {joining} of {len(told)} and not on the others: "
                "set it on all to join a cluster, or on none"
            )
        locals_ = find_locals([LocalPlace.of(one["place"]) for one in told])
        if self._state is None:
            return [{"local": local} for local in locals_]
        demand_no_cluster(os.environ, self._size, locals_[0][1])
        total = sum(
            one["servers"] for one, local in zip(told, locals_, strict=True) if local[0] == 0
        )
        host = scheduler_host(os.environ, self._size == locals_[0][1])
        address = asdict(self._start_scheduler(self._state, host, total))
        return [{"local": local, "address": address} for local in locals_]

    def _join(self, state: _Embedded, ranks: Ranks, address: Address, servers: int) -> None:
        environment = address.environment(self._size)
        for number in range(servers if ranks.local_rank == 0 else 0):
            # After the workers of this host, so that all have metrics at ports of their own.
            local = {"BYTEPS_LOCAL_RANK": str(ranks.local_world_size + number)}
            own = {**environment, **local}
            _start_child(state, f"server {number}", self._executable, "server", own)
        state.saved_environment = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)

    def _start_scheduler(self, state: _Embedded, host: str, servers: int) -> Address:
        """Start the scheduler and wait until it listens."""
        asked = Address(host=host, port=0, servers=servers, secret=_new_secret(os.environ))
        port_file = state.make_folder() / "scheduler.port"
        scheduler = _start_child(
            state,
            "scheduler",
            self._executable,
            "scheduler",
            asked.environment(self._size),
            ["--port-file", str(port_file)],
        )
        while not port_file.exists():
            # Ended by the end of the child; deadline: 10 ms, then the file is looked for.
            if scheduler.wait(min(self._deadline, time.monotonic() + 0.01)):
                raise byteps_error(
                    f"the embedded scheduler ended with status {scheduler.status} before it "
                    "listened: " + " / ".join(scheduler.last_lines())
                )
            if time.monotonic() >= self._deadline:
                raise byteps_error(
                    "the embedded scheduler did not listen in time (BYTEPS_START_TIMEOUT_S): "
                    + " / ".join(scheduler.last_lines())
                )
        port = int(port_file.read_text().split()[1])
        port_file.unlink()
        # Not by a logger: at its default level it says nothing, and who lost an address must see
        # this.
        sys.stderr.write(
            logs.render(
                logging.INFO,
                "embedded mode (DMLC_PS_ROOT_URI is not set): this rank has started the scheduler "
                f"at {join_host_port(host, port)}, and the first rank of each host starts its "
                f"servers, {servers} in all; their logs are in {state.folder}",
            )
            + "\n"
        )
        return replace(asked, port=port)


def join_host_port(host: str, port: int) -> str:
    """The two as one word."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _start_child(
    state: _Embedded,
    title: str,
    executable: str,
    role: str,
    environment: Mapping[str, str],
    arguments: Sequence[str] = (),
) -> Child:
    log = state.make_folder() / f"{title.replace(' ', '-')}.log"
    options = ("--role", role, f"--die-with-parent=worker {state.rank}", "--log", str(log))
    child = Child(
        title,
        [executable, *options, *arguments],
        {**os.environ, **environment, "DMLC_ROLE": role},
        log,
    )
    state.children.append(child)
    return child


def leave() -> None:
    """This rank has left the cluster in order; without one, do nothing.

    Scheduler and servers that it started serve the ranks that have not: they end by themselves,
    with status 0, once every worker left. This process waits for that when it ends (`stop_at_exit`,
    `stop_left`): not here, where another rank may wait for this one.
    """
    global _current
    state, _current = _current, None
    if state is None or state.pid != os.getpid():  # a forked copy owns nothing
        return
    state.forget_address()
    if not any(child.running for child in state.children):
        state.remove_logs()
        return
    _left.append(state)
    threading.Thread(target=_outlive, args=(state,), name="byteps-outlive", daemon=True).start()


def _outlive(state: _Embedded) -> None:
    state.outlive()
    _left.remove(state)


def stop(graceful: bool = True, timeout_s: float | None = None) -> None:
    """End what start_if_needed() started here and put the environment back; without it, do nothing.

    Call it after this rank left the cluster. `graceful` waits for the children's end, up to
    `timeout_s` (default BYTEPS_OP_TIMEOUT_S: a rank that is still at work needs them). It waits no
    longer than 5 s once one of them has failed, or when this process ends by an exception: other
    ranks may hang until it has ended. Then, or at once when not `graceful`, they are terminated
    and, 5 s later, killed. The logs stay only when a child failed.
    """
    global _current
    state, _current = _current, None
    if state is None or state.pid != os.getpid():  # a forked copy owns nothing
        return
    state.forget_address()
    patience = _leave_timeout_s() if timeout_s is None else timeout_s
    state.end(time.monotonic() + (patience if graceful else 0.0))


def has_left() -> bool:
    """Whether something runs that this process has started and left to other ranks."""
    return any(state.pid == os.getpid() for state in _left)


def stop_left(*, hurries: bool = False) -> None:
    """The same, gracefully, for what jobs have that this rank has left: only when it ends.

    Args:
        hurries: it ends by a failure, which other ranks may wait for.
    """
    deadline = time.monotonic() + (REST_S if hurries else _leave_timeout_s())
    for state in list(_left):
        if state.pid == os.getpid():
            state.end(deadline)


def _leave_timeout_s() -> float:
    # Set by the interpreter for an exception that nobody caught; at a prompt, life goes on.
    dying = getattr(sys, "last_exc", None) is not None and not hasattr(sys, "ps1")
    if dying:
        return REST_S
    try:
        return seconds(os.environ, "BYTEPS_OP_TIMEOUT_S", DEFAULT_LEAVE_TIMEOUT_S)
    except RuntimeError:  # set to junk since init: no reason not to end
        return DEFAULT_LEAVE_TIMEOUT_S
