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
"""Raised by everything in byteps.torch that fails: a lost peer, a timeout, workers that disagree, a
bad setting.  The text names what and who.  Bad arguments raise a subclass that is a ValueError
too."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the launcher said of this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    replica: int = 0
    replicas: int = 1


_joined_by = -1
"""The process that is the worker."""
_launch: Launch | None = None
_sessions = 0
_handled_at_init = 0
"""The id of the exception that is handled around all of this, if one is."""
_lock = threading.Lock()


def _told(given: Mapping[str, str]) -> Launch:
    """Returns the environment's settings, but for those that are given. Raises BytePSError for
    settings that cannot be."""
    names = (field.name for field in fields(Launch))
    return Launch(**dict(zip(names, c_lib.launch(given), strict=True)))


def _of_torch() -> tuple[int, int] | None:
    """Rank and size in torch.distributed, if they are this worker's too; None: the environment says
    these, and where it names a scheduler it may say others."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    said = ("RANK", "WORLD_SIZE", "DMLC_WORKER_ID", "DMLC_NUM_WORKER")
    if c_lib.setting("DMLC_PS_ROOT_URI") and any(map(c_lib.is_set, said)):
        return None
    return dist.get_rank(), dist.get_world_size()


def _after_fork_in_child() -> None:
    """What a forked process has of the job belongs to its parent: c_lib has closed its copies of
    the connections, and refuses all calls."""
    global _lock
    _lock = threading.Lock()  # another thread may have held it
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

    The scheduler's address is DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, rank and size are the
    launcher's (RANK, WORLD_SIZE), or those of torch.distributed where there is no launcher.
    Without an address a scheduler and servers are started next to the ranks and end with them
    (embedded mode); then rank and size are those of torch.distributed.  Does nothing when
    initialised.

    Args:
        lazy: accepted for compatibility; joining is never put off.
        quorum: REPLICAS@SECONDS, the same on all workers: once so many replicas have pushed, the
            others have so long. One that is later is removed, and joins again when it is started
            again. None: they have as long as a sum may take (BYTEPS_OP_TIMEOUT_S).
        local: this rank's number among those of its host, and how many these are, where the ranks
            have found it. None: the launcher says it.
        op_timeout_s: how long a sum may take, where BYTEPS_OP_TIMEOUT_S does not say it.
        of_torch: while torch.distributed is being initialised: its rank and size. None: as above.
        store: while torch.distributed is being initialised: its store. None: the default one.

    A process that is forked from a worker, as torch's DataLoader does, is none itself: there
    `is_initialized` is False, `rank` and `size` still tell the parent's, `shutdown` does nothing
    and all else raises BytePSError.

    Raises:
        BytePSError: the scheduler does not answer or refuses, nodes stay away, a bad setting; or
            this process was forked from a worker.
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
    """Join with these settings, which go before the environment's and a place that is found.

    Args:
        shared: further settings, also of a scheduler and servers that are started.
        given: rank and size in torch.distributed; None: others say them.
        store: of torch.distributed; None: the default one.
    """
    global _handled_at_init, _joined_by, _launch, _sessions
    launch = _told({**({} if given is None else place_settings(*given, 0, 1)), **settings})
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
    found = embedded.start_if_needed(rank, size, store, of_torch=of_torch, settings=shared)
    try:
        settings = {**found, **settings, **shared}
        launch = _told(settings)
        c_lib.init(gpu=_gpu(), given=settings)
    except BaseException:
        embedded.stop()
        raise
    _launch = launch
    in_flight.registers_memory = c_lib.registers_memory()
    in_flight.rank = _launch.rank
    _joined_by = os.getpid()
    _sessions += 1
    _handled_at_init = id(sys.exception())
    atexit.register(_at_exit)


def _gpu() -> str:
    """The PCI bus id of the GPU that this process has chosen, whose NICs are near; "": none yet."""
    if not torch.cuda.is_initialized():
        return ""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    numbers = [getattr(gpu, f"pci_{of}_id", -1) for of in ("domain", "bus", "device")]
    if min(numbers) < 0:  # torch does not say
        return ""
    return "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def shutdown() -> None:
    """Finish what is in flight, leave the job, close all connections.

    The cluster ends when all workers have left; this does not wait for them, but the end of a
    process does that has started servers.  Others that wait for a push of this worker get an error.
    Does nothing when not initialised, nor in a process that was forked from the worker: what it has
    of the job belongs to its parent.

    After a failure `init` may be called again, with another RANK and WORLD_SIZE too, where there is
    a scheduler to join: one with ``--keep`` takes the next restart of the job, and in embedded
    mode new ones are started.  To such a scheduler a worker in which a sum failed has failed.
    Tensors are declared anew and handles of the last job are none any more.

    Called while an exception is handled, as in ``finally``, it tells the others that this worker
    failed, and by what: then the job has failed for all of them.
    """
    error = sys.exception()
    if id(error) == _handled_at_init:  # all of the job is done in some handler
        error = None
    _leave(_cause_of(error or _last_error()))


def abort(reason: str) -> None:
    """Leave the job as one that failed: all that is in flight fails, on the other ranks too."""
    _leave(reason)


def leave(reason: str) -> int:
    """Leave a job of replicas, which goes on without this one. All workers of the replica call
    this, between two steps.

    Args:
        reason: for the others to read.

    Returns:
        the exit status that tells who started this process that it has left.
    """
    _leave(reason)
    return leaving.status()


def _leave(failure: str) -> None:
    """Shut down; `failure`: why this process ends, if not because its work is done."""
    if os.getpid() != _joined_by:
        return
    # After a failure servers and scheduler end by themselves or not at all.
    graceful = not c_lib.has_failed()
    _stop(suspend=False, failure=failure)
    if not graceful:
        return embedded.stop()
    embedded.leave()
    _outlast_those_left()


def _leave_for_good(failure: str) -> None:
    """The same at the end of the process, with which the servers that it has started end."""
    _leave(failure)
    embedded.end_left(hurries=bool(failure))


def _at_exit() -> None:
    """Leave at the end of the process: with the exception that ends it, where there is one, or
    later, with the exit status, which only the C library learns."""
    failure = _cause_of(_last_error())
    if os.getpid() != _joined_by or failure or c_lib.has_failed():
        return _leave_for_good(failure)
    # The C library calls what is registered last first.
    if not embedded.end_at_exit(c_lib.end_children_at_exit):
        return _leave_for_good(failure)
    with _lock:
        c_lib.shutdown_at_exit(in_flight.held())
        _on_abrupt_exit(_leave_for_good)


_outlasts = False
"""Whether the end of this process waits for what it has left to other ranks."""


def _outlast_those_left() -> None:
    """Have the end of the process wait for what it has started and left to the other ranks."""
    global _outlasts
    if _outlasts or not embedded.has_left():
        return
    _outlasts = True
    atexit.register(_outlast)
    # Python's handlers are not called where multiprocessing has forked the process.
    _on_abrupt_exit(lambda reason: embedded.end_left(hurries=bool(reason)))


def _outlast() -> None:
    if _last_error() or not embedded.end_at_exit(c_lib.end_children_at_exit):
        embedded.end_left(hurries=bool(_last_error()))


def suspend() -> None:
    """Leave the job for a while: scheduler and servers wait for the workers to `resume`.

    To be called by all workers.

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
        c_lib.has_failed()  # raises, and says what to do


def resume(num_workers: int, num_servers: int, global_rank: int) -> None:
    """Join again after `suspend`, possibly with another number of workers.

    Args:
        num_workers: workers that the job has now.
        num_servers: servers that the job has now.
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
        # The launcher's must not contradict the new numbers.
        if c_lib.is_set(launcher):
            settings[launcher] = value
    with _lock:
        _join({name: str(value) for name, value in settings.items()}, {}, None, None)


def is_initialized() -> bool:
    """Whether this process is in a job. A process that was forked from a worker is not."""
    return c_lib.is_initialized()


def number() -> int:
    """How many jobs this process has joined. Names and handles are those of one job."""
    return _sessions


def launched() -> Launch:
    """What the launcher said. Raises BytePSError where this process is in no job."""
    if _launch is None:
        raise BytePSError("byteps is not initialized; call bps.init() first")
    return _launch


def rank() -> int:
    """This worker's rank, 0 <= rank < size(). Raises BytePSError when not initialized."""
    return launched().rank


def size() -> int:
    """Workers in the job."""
    return launched().size


def local_rank() -> int:
    """This worker's rank among those of its host."""
    return launched().local_rank


def local_size() -> int:
    """Workers on this host."""
    return launched().local_size


def replica() -> int:
    """Which of the model's replicas this job is, 0 <= replica < replicas(). Before `init` too."""
    return (_launch or _told({})).replica


def first_rank() -> int:
    """Of the ranks of this replica, the lowest: rank 0 of its torch.distributed. 0 where this
    process is in no job."""
    if _launch is None:
        return 0
    return _launch.replica * (_launch.size // _launch.replicas)


def replicas() -> int:
    """Jobs that train one model, and meet only at the servers; 1 where this is the only one.
    Workers of all of them count in `rank` and `size`, those of replica 0 first. Before `init`
    too."""
    return (_launch or _told({})).replicas


# Why a worker's process ends, for the others to know.

_TEXT_CHARS = 500
"""Of an exception, for the other nodes to read."""


def _reason_of(error: BaseException | None) -> str:
    """What is told of a process that ends by this exception; empty if it ends well."""
    if error is None:
        return ""
    if isinstance(error, SystemExit):
        # As the interpreter does: a text is printed, and is a failure.
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        return _of_status(status)
    return traceback.format_exception_only(error)[-1].strip()[:_TEXT_CHARS]


_ECHO = re.compile(
    "closed by peer|reset by peer|broken pipe|connection closed|socket closed|connection was likely"
    "|connection refused|remote process exited|failed to recv|failed to send",
    re.IGNORECASE,
)
"""Errors that torch.distributed raises on the other ranks when one has ended."""
_ECHO_S = 3.0
"""How long the news of a lost rank may take by the scheduler, where another way was faster."""


def _cause_of(error: BaseException | None) -> str:
    """What is told of a process that ends by this exception; empty if it ends well.

    An exception that may be another rank's end, as torch.distributed notices it, is told only if
    the scheduler does not notice that within a moment: otherwise the wrong rank would be blamed.
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
    return any(isinstance(one, RuntimeError) and _ECHO.search(str(one)) for one in seen)


def _of_status(status: int) -> str:
    """What is told of a process that ends with this exit status; empty for 0."""
    return f"exit status {status}" if status != 0 else ""


def _last_error() -> BaseException | None:
    """The exception that nobody caught and that ends the interpreter, if it does. SystemExit is
    none of these."""
    if hasattr(sys, "ps1"):  # at a prompt life goes on
        return None
    return getattr(sys, "last_exc", None)


def _on_abrupt_exit(leave: Callable[[str], None]) -> None:
    """Call ``leave(reason)`` if the process ends by os._exit() after Python's exit handlers,
    as one does that multiprocessing forked: the C library's handlers are not called then."""
    end_now = os._exit
    worker = os.getpid()

    def leave_and_exit(status: int) -> NoReturn:
        if os.getpid() == worker:
            leave(_of_status(status))
        end_now(status)

    os._exit = leave_and_exit
