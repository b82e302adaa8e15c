"""Embedded mode: a scheduler and servers next to the ranks, for a job that names no scheduler.

``bps.init()`` calls :func:`start_if_needed` first. With ``DMLC_PS_ROOT_URI`` set the job joins
that cluster and nothing happens here. Without it, global rank 0 starts the scheduler on a port
that the kernel chooses, the first rank of every host starts servers there, and the address travels
to every rank through torch.distributed's default store, with a secret that rank 0 makes unless
BYTEPS_SECRET or BYTEPS_SECRET_FILE is set. Rank 0 says so in one line, with what that costs. Where
other settings show that a cluster was meant, nothing is started. ``bps.shutdown()`` calls
:func:`leave` last, or :func:`stop` after a failure.

Children serve the other ranks until these have left, and no child outlives its rank: that waits for
them when its process ends. ``--die-with-parent`` makes the kernel end it, also when the rank is
killed. The other ranks are then told which one was lost, and the children remove their logs: these
say no more. Logs are kept where a child has failed by itself. Where everything is killed at once,
nobody is left to remove them.
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
"""Starts whose jobs this rank has left, and other ranks may not have."""

EndChildren = Callable[[list[tuple[str, int, str]], str, float, float], bool]
"""``c_lib.end_children_at_exit``. Takes title, process and log of each child, the folder to remove,
what to wait in s, and what after a failure."""


def is_running() -> bool:
    """Whether this process is in a cluster that the embedded mode started."""
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

    Blocks until the address is known; collective over all ranks. Raises BytePSError within
    BYTEPS_START_TIMEOUT_S with the reason, on every rank that takes part; what this rank had
    started is ended then.

    Args:
        rank: of this process in the job.
        size: ranks of the job.
        store: of torch.distributed, for more than one rank.
        of_torch: torch.distributed says both, and not the environment.
        settings: of what is started; they go before the environment's.

    Returns:
        What this process has found out, as settings that go before its environment's: its place,
        and the address and the secret of what was started.
    """
    global _current
    if _current is not None:
        return _current.address
    joins = bool(os.environ.get("DMLC_PS_ROOT_URI"))
    if joins and not of_torch:
        return {}
    place = LocalPlace.own(os.environ, host_name(setting("BYTEPS_HOST_ID", str)))
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
        return Start(rank, size, store).find(place)
    _current = EmbeddedNodes(rank, settings)
    try:
        return Start(rank, size, store, _current).find(place)
    except BaseException:
        stop()
        raise


def demand_no_cluster(env: Mapping[str, str]) -> None:
    """Raises BytePSError where a job that names no scheduler was meant to: what only a cluster
    needs is set. DMLC_NUM_WORKER alone may stand in for WORLD_SIZE."""
    names = ["DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER"]
    if "WORLD_SIZE" in env:
        names.append("DMLC_NUM_WORKER")
    if env.get("BYTEPS_REPLICA"):  # all replicas join one scheduler
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
    """Warn of a launcher that starts ranks again with a store that has the ended ones' addresses:
    these ranks would fail in torch.distributed, before anything of ours can say why."""
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
    """Expect that the processes of start_if_needed() end with this process, which has failed.

    Their ends are not failures of their own.
    """
    for child in [] if _current is None else _current.children:
        child.expect_end()


def stop() -> None:
    """End at once what start_if_needed() started here."""
    global _current
    nodes, _current = _current, None
    if nodes is not None and nodes.is_own:
        nodes.end(time.monotonic())


def leave() -> None:
    """This rank has left the cluster in order.

    Scheduler and servers that it started serve the ranks that have not: they end by themselves,
    with status 0, once every worker left. This process waits for that when it ends (`end_at_exit`,
    `end_left`): not here, where another rank may wait for this one.
    """
    global _current
    nodes, _current = _current, None
    if nodes is not None and nodes.is_own:
        nodes.leave()
        _left.append(nodes)


def has_left() -> bool:
    """Whether something runs that this process has started and left to other ranks."""
    return any(nodes.running for nodes in _left)


def end_at_exit(end_children: EndChildren) -> bool:
    """Have what this process started ended with it, once its exit status is known.

    Returns:
        Whether that is arranged, or nothing needs to be; else call :func:`leave`, :func:`end_left`.
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
    """At the end of this process wait for what it has left to other ranks, up to
    BYTEPS_OP_TIMEOUT_S, for a rank that is still at work needs it; then end it.

    Args:
        hurries: the process ends by a failure, which other ranks may wait for: 5 s.
    """
    patience = max(map(_leave_timeout_s, _left), default=0.0)
    deadline = time.monotonic() + (REST_S if hurries else patience)
    for nodes in _left:
        nodes.end(deadline)


def _leave_timeout_s(nodes: EmbeddedNodes) -> float:
    with contextlib.suppress(RuntimeError):  # set to junk since init: no reason not to end
        return setting("BYTEPS_OP_TIMEOUT_S", float, nodes.settings)
    return USUAL_LEAVE_TIMEOUT_S
