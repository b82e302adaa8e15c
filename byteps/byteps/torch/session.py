"""This process as a worker of a job: joining, leaving, rank and size. One worker per process."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import NoReturn

import torch
import torch.distributed as dist
from byteps import logs
from byteps.launcher import embedded, leaving
from byteps.launcher.meeting import Store
from byteps.launcher.places import place_settings
from byteps.torch import c_lib, in_flight
from byteps.torch.in_flight import completions
from byteps.torch.wire import feedback

logger = logging.getLogger(__name__)

BytePSError = c_lib.BytePSError
"""Error that every failure in byteps.torch raises: a lost peer, a timeout, workers that disagree,
an invalid setting. Its text names cause and peer. For invalid arguments a subclass is raised, which
is also a ValueError."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Ranks and sizes that the launcher gave this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    replica: int = 0
    replicas: int = 1


_joined_by = -1
"""Id of the process that joined the job. Forked processes are no workers."""
_launch: Launch | None = None
_sessions = 0
_handled_at_init = 0
"""Id of the exception, if any, that was being handled when this process joined."""
_lock = threading.Lock()


def _launch_of(given: Mapping[str, str]) -> Launch:
    """Return the launcher's settings from the environment. `given` overrides them. Raises
    BytePSError for invalid settings."""
    names = (field.name for field in fields(Launch))
    return Launch(**dict(zip(names, c_lib.launch(given), strict=True)))


def _of_torch() -> tuple[int, int] | None:
    """Return the rank and size in torch.distributed, if this worker uses these. Return None if the
    environment names a scheduler, and sets rank or size itself."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    said = ("RANK", "WORLD_SIZE", "DMLC_WORKER_ID", "DMLC_NUM_WORKER")
    if c_lib.setting("DMLC_PS_ROOT_URI") and any(map(c_lib.is_set, said)):
        return None
    return dist.get_rank(), dist.get_world_size()


def _after_fork_in_child() -> None:
    """Reset the state in a forked process, since the job belongs to the parent process. c_lib has
    closed this process's copies of the connections, and refuses all calls."""
    global _lock
    _lock = threading.Lock()  # Another thread of the parent may have held the old lock at the fork.
    if not c_lib.is_forked_copy():
        return
    atexit.unregister(_at_exit)
    in_flight.registers_memory = False
    in_flight.forget()
    feedback.forget()
    completions.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def init(
    lazy: bool = True,
    *,
    quorum: str | None = None,
    local: tuple[int, int] | None = None,
    op_timeout_s: float | None = None,
    of_torch: tuple[int, int] | None = None,
    store: Store | None = None,
) -> None:
    """Join the cluster as one worker; return when all workers and servers have.

    The scheduler's address is DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT. Rank and size are the
    launcher's (RANK, WORLD_SIZE); without a launcher, those of torch.distributed. Without an
    address, a scheduler and servers are started next to the ranks and end with them (embedded
    mode); then rank and size are those of torch.distributed. Does nothing if already initialized.

    Args:
        lazy: accepted for compatibility and ignored: `init` always joins at once.
        quorum: REPLICAS@SECONDS, the same on all workers: once that many replicas have pushed, the
            other replicas have that many seconds left. A replica that takes longer is removed, and
            joins again after a restart. None: replicas have BYTEPS_OP_TIMEOUT_S.
        local: local rank and local size, if the ranks have found them. None: the launcher's.
        op_timeout_s: timeout of a sum, in seconds, if BYTEPS_OP_TIMEOUT_S is not set.
        of_torch: rank and size of torch.distributed while it is being initialized. None: rank and
            size are found as described above.
        store: store of torch.distributed while it is being initialized. None: the default store.

    A process forked from a worker (by torch's DataLoader, for example) is not a worker. There
    `is_initialized` is False, `rank` and `size` return the parent's, `shutdown` does nothing, and
    everything else raises BytePSError.

    Raises:
        BytePSError: the scheduler does not answer or refuses, nodes are missing, a setting is
            invalid, or this process was forked from a worker.
    """
    del lazy
    settings = {"BYTEPS_QUORUM": quorum} if quorum else {}
    if local is not None:
        settings |= dict(
            zip(("BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE"), map(str, local), strict=True)
        )
    with _lock:
        _demand_no_copy()
        if c_lib.is_initialized():
            return
        shared = {}
        if op_timeout_s is not None and not c_lib.is_set("BYTEPS_OP_TIMEOUT_S"):
            shared["BYTEPS_OP_TIMEOUT_S"] = f"{op_timeout_s:g}"
        _join(settings, shared, of_torch or _of_torch(), store)


def _join(
    settings: Mapping[str, str],
    shared: Mapping[str, str],
    given: tuple[int, int] | None,
    store: Store | None,
) -> None:
    """Join with these settings. They override the environment, and a local rank that was found
    before.

    Args:
        shared: more settings, also passed to a scheduler and servers started here.
        given: rank and size in torch.distributed; None: the launcher's.
        store: store of torch.distributed; None: the default store.
    """
    global _handled_at_init, _joined_by, _launch, _sessions
    launch = _launch_of({**({} if given is None else place_settings(*given, 0, 1)), **settings})
    logs.install(
        launch.rank,
        form=str(c_lib.setting(logs.FORMAT)) if c_lib.is_set(logs.FORMAT) else None,
        hide_time=bool(c_lib.setting(logs.HIDE_TIME)),
    )
    for warning in c_lib.unknown_variables():
        logger.warning("%s", warning)
    if store is None and given is not None:
        store = dist.distributed_c10d._get_default_store()
    rank, size = given or (launch.rank, launch.size)
    of_torch = given is not None
    started = embedded.start_if_needed(rank, size, store, of_torch=of_torch, settings=shared)
    try:
        settings = {**started, **settings, **shared}
        launch = _launch_of(settings)
        c_lib.init(gpu=_gpu(), given=settings)
    except BaseException:
        embedded.stop(keeps_logs=True)
        raise
    _launch = launch
    in_flight.registers_memory = c_lib.registers_memory()
    in_flight.rank = _launch.rank
    _joined_by = os.getpid()
    _sessions += 1
    _handled_at_init = id(sys.exception())
    atexit.register(_at_exit)


def _gpu() -> str:
    """Return the PCI bus id of this process's GPU, to find NICs near the GPU. Return "" if no GPU
    is chosen yet."""
    if not torch.cuda.is_initialized():
        return ""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    numbers = [getattr(gpu, f"pci_{of}_id", -1) for of in ("domain", "bus", "device")]
    if min(numbers) < 0:  # This build of torch does not report the bus id.
        return ""
    return "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def shutdown() -> None:
    """Finish operations in flight, leave the job, close all connections.

    The cluster ends when all workers have left. This function does not wait for them, but a process
    that has started servers does so at its end. Workers that wait for a push of this worker get an
    error. Does nothing if not initialized, or in a process forked from the worker.

    After a failure `init` may be called again, even with another RANK and WORLD_SIZE, if there is a
    scheduler to join: one with ``--keep`` accepts the restarted job, and embedded mode starts a new
    one. A worker in which a sum failed counts as failed. Tensors must be declared anew, and handles
    of the last job are invalid.

    If an exception is being handled, as in ``finally``, this function reports it to the other
    nodes, and the job fails for all of them.
    """
    error = sys.exception()
    # The job ran inside an exception handler, so the exception is not the reason for its end.
    if id(error) == _handled_at_init:
        error = None
    _leave(_cause_of(error or _last_error()))


def abort(reason: str) -> None:
    """Leave the job as failed: all operations in flight fail, on the other ranks too."""
    _leave(reason)


def leave(reason: str) -> int:
    """Leave a job that has replicas; the job goes on without this replica. All workers of this
    replica call this, between two steps.

    Args:
        reason: text for the other nodes' logs.

    Returns:
        the exit status that tells the launcher that this process has left.
    """
    _leave(reason)
    return leaving.status()


def _leave(failure: str) -> None:
    """Shut down. `failure`: why this process ends; empty if its work is done."""
    if os.getpid() != _joined_by:
        return
    # After a failure, servers and scheduler end by themselves, without a goodbye.
    graceful = not c_lib.has_failed()
    if failure and graceful:
        embedded.expect_end()
    _stop(suspend=False, failure=failure)
    if not graceful:
        return embedded.stop()
    embedded.leave()
    _outlast_those_left()


def _leave_for_good(failure: str) -> None:
    """Leave at the end of the process, then end the servers that the process has started."""
    _leave(failure)
    embedded.end_left(hurries=bool(failure))


def _at_exit() -> None:
    """At the end of the process: if an exception ends it, report the exception and leave the job.
    Otherwise leave later, in an exit handler of the C library, which also gets the exit status."""
    failure = _cause_of(_last_error())
    if os.getpid() != _joined_by or failure or c_lib.has_failed():
        return _leave_for_good(failure)
    # The C library calls exit handlers in reverse order of registration.
    if not embedded.end_at_exit(c_lib.end_children_at_exit):
        return _leave_for_good(failure)
    with _lock:
        c_lib.shutdown_at_exit(in_flight.held())
        _on_abrupt_exit(_leave_for_good)


_outlasts = False
"""Whether the end of this process waits for its servers, which other ranks may still use."""


def _outlast_those_left() -> None:
    """Make the end of this process wait for its servers, which other ranks may still use."""
    global _outlasts
    if _outlasts or not embedded.has_left():
        return
    _outlasts = True
    atexit.register(_outlast)
    # Processes that multiprocessing has forked do not run Python's exit handlers.
    _on_abrupt_exit(lambda reason: embedded.end_left(hurries=bool(reason)))


def _outlast() -> None:
    if _last_error() or not embedded.end_at_exit(c_lib.end_children_at_exit):
        embedded.end_left(hurries=bool(_last_error()))


def suspend() -> None:
    """Leave the job temporarily: scheduler and servers wait for the workers to `resume`.

    All workers call this.

    Raises:
        BytePSError: this process was forked from a worker.
    """
    _demand_no_copy()
    _stop(suspend=True)


def _stop(*, suspend: bool, failure: str = "") -> None:
    global _launch
    with _lock:
        if not c_lib.is_initialized():
            return
        atexit.unregister(_at_exit)
        _warn_of_unawaited(failure)
        c_lib.shutdown(suspend, failure)
        completions.stop()
        in_flight.forget()
        feedback.forget()
        _launch = None


def _warn_of_unawaited(failure: str) -> None:
    if failure or c_lib.has_failed() or not in_flight.sums:
        return
    first = next(iter(in_flight.sums.values())).name
    logger.warning(
        "%d handles were never synchronized, the first of %r: their tensors were kept until now; "
        "call bps.synchronize(handle)",
        *(len(in_flight.sums), first),
    )


def _demand_no_copy() -> None:
    if c_lib.is_forked_copy():
        c_lib.has_failed()  # has_failed raises an error that says how to proceed


def resume(num_workers: int, num_servers: int, global_rank: int) -> None:
    """Join again after `suspend`, possibly with another number of workers.

    Args:
        num_workers: the new number of workers.
        num_servers: the new number of servers.
        global_rank: this worker's rank, 0 <= global_rank < num_workers.
    """
    _demand_no_copy()
    if c_lib.is_initialized():
        raise BytePSError("resume() needs a suspend() before it")
    settings = {"DMLC_NUM_SERVER": num_servers}
    for launcher, ours, value in (
        ("WORLD_SIZE", "DMLC_NUM_WORKER", num_workers),
        ("RANK", "DMLC_WORKER_ID", global_rank),
    ):
        settings[ours] = value
        # The launcher's settings must not contradict the new numbers.
        if c_lib.is_set(launcher):
            settings[launcher] = value
    with _lock:
        _join({name: str(value) for name, value in settings.items()}, {}, None, None)


def is_initialized() -> bool:
    """Whether this process is in a job. A process that was forked from a worker is not."""
    return c_lib.is_initialized()


def number() -> int:
    """Return how many jobs this process has joined. Names and handles are valid within one job."""
    return _sessions


def launched() -> Launch:
    """Return the launcher's settings. Raises BytePSError if this process is in no job."""
    if _launch is None:
        raise BytePSError("byteps is not initialized; call bps.init() first")
    return _launch


def rank() -> int:
    """Return this worker's rank, 0 <= rank < size(). Raises BytePSError before `init`."""
    return launched().rank


def size() -> int:
    """Return the number of workers in the job."""
    return launched().size


def local_rank() -> int:
    """Return this worker's rank among the workers of its host."""
    return launched().local_rank


def local_size() -> int:
    """Return the number of workers on this host."""
    return launched().local_size


def replica() -> int:
    """Return the index of this replica, 0 <= replica < replicas(). Works before `init`, too."""
    return (_launch or _launch_of({})).replica


def first_rank() -> int:
    """Return the lowest rank of this replica: the worker with this rank is rank 0 of the replica's
    torch.distributed. Return 0 if this process is in no job."""
    if _launch is None:
        return 0
    return _launch.replica * (_launch.size // _launch.replicas)


def replicas() -> int:
    """Return the number of replicas, which are jobs that train the same model and meet only at the
    servers. Return 1 without replicas. `rank` and `size` count the workers of all replicas; those
    of replica 0 have the lowest ranks. Works before `init`, too."""
    return (_launch or _launch_of({})).replicas


# Reasons for the end of a worker's process, as reported to the other nodes.

_TEXT_CHARS = 500
"""Limit of the length of an exception's text for the other nodes, in characters."""


def _reason_of(error: BaseException | None) -> str:
    """Return the text to report for a process that ends by this exception. The text is empty if the
    process ends with success."""
    if error is None:
        return ""
    if isinstance(error, SystemExit):
        # The interpreter does the same: it ends with status 1 if the exit code is a text.
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        return _of_status(status)
    return traceback.format_exception_only(error)[-1].strip()[:_TEXT_CHARS]


_ECHO = re.compile(
    "closed by peer|reset by peer|broken pipe|connection closed|socket closed|connection was likely"
    "|connection refused|remote process exited|failed to recv|failed to send",
    re.IGNORECASE,
)
"""Errors that torch.distributed raises on other ranks when a rank has ended."""
_ECHO_S = 3.0
"""Time in seconds to wait for the scheduler's report of a lost rank, if torch.distributed has
noticed the loss first."""


def _cause_of(error: BaseException | None) -> str:
    """Return the text to report for a process that ends by this exception. The text is empty if the
    process ends with success.

    torch.distributed raises on this rank if another rank has ended. Such an exception is reported
    only if the scheduler reports no lost rank within _ECHO_S. Otherwise the wrong rank would be
    blamed.
    """
    if error is None or os.getpid() != _joined_by or not c_lib.is_initialized():
        return _reason_of(error)
    deadline = time.monotonic() + (_ECHO_S if size() > 1 and _is_echo(error) else 0.0)
    while not c_lib.has_failed() and time.monotonic() < deadline:
        time.sleep(0.01)
    return _reason_of(error)


def _is_echo(error: BaseException) -> bool:
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        seen.append(following)
        following = following.__cause__ or following.__context__
    return any(isinstance(error, RuntimeError) and _ECHO.search(str(error)) for error in seen)


def _of_status(status: int) -> str:
    """Return the text to report for this exit status. The text is empty for 0."""
    return f"exit status {status}" if status != 0 else ""


def _last_error() -> BaseException | None:
    """Return the uncaught exception that ends the interpreter, if any, except SystemExit."""
    if hasattr(sys, "ps1"):  # an interactive prompt survives exceptions
        return None
    return getattr(sys, "last_exc", None)


def _on_abrupt_exit(leave: Callable[[str], None]) -> None:
    """Call ``leave(reason)`` if the process ends by os._exit() after Python's exit handlers, as a
    process that multiprocessing has forked does. The C library's handlers are not called then."""
    end_now = os._exit
    worker = os.getpid()

    def leave_and_exit(status: int) -> NoReturn:
        if os.getpid() == worker:
            leave(_of_status(status))
        end_now(status)

    os._exit = leave_and_exit
