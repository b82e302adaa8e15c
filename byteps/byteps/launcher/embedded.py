"""Embedded mode: a scheduler and servers next to the ranks, for a job that names no scheduler.

``bps.init()`` calls :func:`start_if_needed` first. If ``DMLC_PS_ROOT_URI`` is set, the job joins
that cluster, and nothing is started here. Otherwise global rank 0 starts the scheduler on a port
that the kernel chooses, and the first rank of every host starts servers on its host. All ranks get
the scheduler's address through torch.distributed's default store. They also get a secret, which
rank 0 makes unless BYTEPS_SECRET or BYTEPS_SECRET_FILE is set. Rank 0 logs a line about this, with
the cores and the memory that servers take. If other settings show that the user meant a cluster,
nothing is started. ``bps.shutdown()`` calls :func:`leave` last, or :func:`stop` after a failure.

Scheduler and servers serve the other ranks until these have left. No child outlives the rank that
started it: a rank's process waits for its children before it ends. Even if a rank is killed,
``--die-with-parent`` makes the kernel end its children. The other ranks then learn which rank was
lost, and the children remove their logs, which say nothing else. Logs are kept if a child has
failed by itself, if the job did not start, or if all processes are killed at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping

from byteps.launcher.embedded_nodes import REST_S, EmbeddedNodes
from byteps.launcher.meeting import Store
from byteps.launcher.places import LocalPlace, byteps_error, host_name, setting
from byteps.launcher.start import Start

USUAL_LEAVE_TIMEOUT_S = 600.0

logger = logging.getLogger(__name__)
_current: EmbeddedNodes | None = None
_left: list[EmbeddedNodes] = []
"""Nodes that this rank has started for jobs that it has left. Other ranks may still be in these
jobs."""

EndChildren = Callable[[list[tuple[str, int, str]], str, float, float], bool]
"""The function ``c_lib.end_children_at_exit``. Its arguments: title, process id and log of each
child; the folder to remove; the longest wait in seconds, and the longest wait after a failure."""


def is_running() -> bool:
    """Whether this process is in a cluster that embedded mode has started."""
    return _current is not None


def start_if_needed(
    rank: int,
    size: int,
    store: Store | None = None,
    *,
    of_torch: bool = False,
    settings: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Start this job's scheduler and servers, unless the environment names a scheduler.

    All ranks call this. Blocks until the scheduler's address is known. On failure, every rank that
    takes part raises BytePSError with the reason within BYTEPS_START_TIMEOUT_S, and ends the
    processes that it had started.

    Args:
        rank: rank of this process in the job.
        size: number of ranks of the job.
        store: store of torch.distributed; needed if the job has more than one rank.
        of_torch: whether `rank` and `size` are those of torch.distributed, not of the environment.
        settings: settings of the started processes; they override the environment.

    Returns:
        Settings that override this process's environment: its local rank and size, and the address
        and the secret of the started cluster.
    """
    global _current
    if _current is not None:
        return _current.address
    joins = bool(os.environ.get("DMLC_PS_ROOT_URI"))
    if joins and not of_torch:
        return {}
    own = LocalPlace.own(os.environ, host_name())
    if not joins:
        demand_no_cluster(os.environ)
    if size > 1 and not of_torch and not {"RANK", "DMLC_WORKER_ID"} & os.environ.keys():
        raise byteps_error(
            f"a job of {size} workers (WORLD_SIZE, DMLC_NUM_WORKER) needs RANK: start it with "
            "torchrun, or call torch.distributed.init_process_group() with rank= and world_size= "
            "before bps.init()"
        )
    if size > 1 and store is None:
        raise byteps_error(
            f"embedded mode with WORLD_SIZE={size} needs torch.distributed: call "
            "torch.distributed.init_process_group() before bps.init(), or set DMLC_PS_ROOT_URI and "
            "DMLC_PS_ROOT_PORT to join a cluster that runs already"
        )
    if rank == 0:
        _warn_of_restarts(os.environ)
    if joins:
        return Start(rank, size, store).find(own)
    _current = EmbeddedNodes(rank, settings)
    try:
        return Start(rank, size, store, _current).find(own)
    except BaseException:
        stop(keeps_logs=True)
        raise


def demand_no_cluster(env: Mapping[str, str]) -> None:
    """Raise BytePSError if variables are set that only a cluster needs: the user has probably
    forgotten to name the scheduler. DMLC_NUM_WORKER alone may be set instead of WORLD_SIZE."""
    names = ["DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER"]
    if "WORLD_SIZE" in env:
        names.append("DMLC_NUM_WORKER")
    if env.get("BYTEPS_REPLICA"):  # all replicas join one scheduler, so it must be named
        names.append("BYTEPS_REPLICA")
    given = [f"{name}={env[name]}" for name in names if name in env]
    if given:
        raise byteps_error(
            f"DMLC_PS_ROOT_URI is {'empty' if 'DMLC_PS_ROOT_URI' in env else 'unset'}, but "
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set: set "
            "DMLC_PS_ROOT_URI to the scheduler's address to join a cluster, or unset the others to "
            "have a scheduler and servers started next to the ranks (embedded mode)"
        )


def _warn_of_restarts(env: Mapping[str, str]) -> None:
    """Warn if the launcher restarts ranks with a store that still has the addresses of ended ranks.
    Restarted ranks would fail in torch.distributed before BytePS could report the cause."""
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        logger.warning(
            "torchrun --max-restarts %s starts ranks again with the same store, in which torch's "
            "process groups (gloo's at least) find the addresses of ended ranks and fail: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, and give it --rdzv-backend c10d "
            "--rdzv-endpoint HOST:PORT instead of --master-addr (scripts/worker.sh does both)",
            restarts,
        )


def expect_end() -> None:
    """Record that this process has failed. The ends of its children then count as no further
    failures."""
    for child in [] if _current is None else _current.children:
        child.expect_end()


def stop(*, keeps_logs: bool = False) -> None:
    """End at once the processes that start_if_needed() has started.

    Args:
        keeps_logs: whether to keep the logs. They may say why a job did not start.
    """
    global _current
    nodes, _current = _current, None
    if nodes is not None and nodes.is_own:
        nodes.keeps_logs |= keeps_logs
        nodes.end(time.monotonic())
        if keeps_logs and nodes.children:
            logger.error(
                "the job did not start; the logs of its processes here are in %s", nodes.folder
            )


def leave() -> None:
    """Record that this rank has left the cluster without a failure.

    The rank's scheduler and servers serve the other ranks, and end by themselves, with status 0,
    when all workers have left. This process waits for them only at its own end (`end_at_exit`,
    `end_left`): here, another rank may wait for this rank.
    """
    global _current
    nodes, _current = _current, None
    if nodes is not None and nodes.is_own:
        nodes.leave()
        _left.append(nodes)


def has_left() -> bool:
    """Whether a scheduler or server of this process still runs for other ranks, in a job that this
    rank has left."""
    return any(nodes.running for nodes in _left)


def end_at_exit(end_children: EndChildren) -> bool:
    """Arrange that this process's children end with it, once its exit status is known.

    Returns:
        whether this is arranged, or nothing runs. If not, call :func:`leave` and :func:`end_left`.
    """
    for nodes in [*_left, *([] if _current is None else [_current])]:
        running = [(child.title, child.pid, str(child.log)) for child in nodes.running]
        if running and not nodes.ends_at_exit:
            folder = "" if nodes.any_failed else str(nodes.folder)
            nodes.ends_at_exit = end_children(running, folder, _leave_timeout_s(nodes), REST_S)
            if not nodes.ends_at_exit:
                return False
    return True


def end_left(*, hurries: bool = False) -> None:
    """At the end of this process, wait at most BYTEPS_OP_TIMEOUT_S for scheduler and servers that
    other ranks still use. Then end them.

    Args:
        hurries: wait only 5 s, because this process ends by a failure, and other ranks may wait for
            its end.
    """
    patience = max(map(_leave_timeout_s, _left), default=0.0)
    deadline = time.monotonic() + (REST_S if hurries else patience)
    for nodes in _left:
        nodes.end(deadline)


def _leave_timeout_s(nodes: EmbeddedNodes) -> float:
    with contextlib.suppress(RuntimeError):  # The processes are ended even if a setting is invalid.
        return setting("BYTEPS_OP_TIMEOUT_S", float, nodes.settings)
    return USUAL_LEAVE_TIMEOUT_S
