"""A worker that ends in one of many ways, and others that see what becomes of the job."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import byteps.torch as bps
import torch
import torch.distributed as dist

from tests.multiproc.programs.job import Job

WHY = "no checkpoint for rank 1"


def _raise() -> None:
    raise RuntimeError(WHY)


def _raise_text() -> None:
    raise SystemExit(WHY)


def _raise_and_shut_down() -> None:
    try:
        _raise()
    finally:
        bps.shutdown()


def _handle_and_shut_down() -> None:
    with contextlib.suppress(RuntimeError):
        _raise()
    bps.shutdown()


def _as_multiprocessing_does(status: int) -> None:
    atexit._run_exitfuncs()
    os._exit(status)


def _hang() -> None:
    time.sleep(1000)


WAYS: dict[str, Callable[[], None]] = {
    "return": lambda: None,
    "shutdown": bps.shutdown,
    "handled": _handle_and_shut_down,
    "exit-0": lambda: sys.exit(0),
    "forked-0": lambda: _as_multiprocessing_does(0),
    "raise": _raise,
    "finally": _raise_and_shut_down,
    "exit-3": lambda: sys.exit(3),
    "exit-text": _raise_text,
    "forked-3": lambda: _as_multiprocessing_does(3),
    "_exit-0": lambda: os._exit(0),
    "_exit-3": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "hang": _hang,
}


def ends(job: Job) -> None:
    """Rank 1 ends as ``way`` of args says; rank 0 sums alone until the test says ``end``, or until
    that fails.

    args: ``first``: rank 0 ends before rank 1 does; ``hangs``: it does nothing until ``end``;
    ``group``: with a process group, for embedded mode; ``swapped``: rank 0 ends in that way, and
    rank 1 is the other.
    """
    ending = 0 if job.args.get("swapped") else 1
    if job.args.get("group"):
        store = dist.FileStore(str(Path(job.folder) / "store"), job.size)
        dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size)
    bps.init()
    total = bps.push_pull(torch.full((100,), job.rank + 1.0), average=False, name="together")
    assert (total == job.size * (job.size + 1) / 2).all()
    job.mark("summed")
    if job.rank == ending:
        job.wait_go("way")
        return WAYS[job.args["way"]]()
    if job.args.get("hangs"):
        return job.wait_go("end")
    while not job.args.get("first") and not (job.folder / "go.end").exists():
        bps.push_pull(torch.ones(100), average=False, name="alone", group=[job.rank])
        time.sleep(0.02)
