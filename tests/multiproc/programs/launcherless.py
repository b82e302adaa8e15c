"""Ranks without a launcher: only torch.distributed knows their numbers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import byteps.torch as bps
import torch
import torch.distributed as dist
from byteps import c10d_plugin
from torch import multiprocessing

from scripts.children import free_ports
from tests.multiproc.programs.job import Job

SIZE = 2
ELEMENTS = 40_000
"""Number of fp32 elements: more bytes than BYTEPS_C10D_MIN_BYTES."""


def spawned(job: Job) -> None:
    """Fork the ranks like mp.spawn, which only passes their number.

    args: ``how`` they meet; ``c10d``: they use torch's all-reduces; ``hosts``: each rank is on its
    own emulated host; ``alone``: each is told to be alone.
    """
    port = free_ports()
    multiprocessing.start_processes(
        _rank, (str(job.folder), port, job.args), nprocs=SIZE, start_method="fork"
    )


def _rank(rank: int, folder: str, port: int, args: dict[str, Any]) -> None:
    if args.get("hosts"):
        os.environ["BYTEPS_HOST_ID"] = f"host {rank}"
    if args.get("c10d"):
        c10d_plugin.install()
    _meet(rank, Path(folder), port, args["how"])
    if not args.get("c10d"):
        bps.init()
    local = (0, 1) if args.get("hosts") or args.get("alone") else (rank, SIZE)
    reported = bps.rank(), bps.size(), bps.local_rank(), bps.local_size()
    assert reported == (rank, SIZE, *local), reported
    tensor = torch.full((ELEMENTS,), rank + 1.0)
    if args.get("c10d"):
        before = bps.get_metrics()["byteps_worker_operations_total"]
        dist.all_reduce(tensor)
        assert bps.get_metrics()["byteps_worker_operations_total"] > before
    else:
        tensor = bps.push_pull(tensor, average=False, name="tensor")
    assert (tensor == 3).all(), tensor
    _leave_one_after_the_other(rank, Path(folder), c10d=bool(args.get("c10d")))


def _meet(rank: int, folder: Path, port: int, how: str) -> None:
    rank_and_size: dict[str, Any] = {"rank": rank, "world_size": SIZE}
    if how == "env":
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(SIZE))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo")
    elif how == "store":
        store = dist.TCPStore("127.0.0.1", port, SIZE, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, **rank_and_size)
    else:
        method = f"file://{folder}/store" if how == "file" else f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=method, **rank_and_size)


def _leave_one_after_the_other(rank: int, folder: Path, *, c10d: bool) -> None:
    """Leave the job rank by rank. Rank 0 has started the servers, and leaves first without a wait;
    the servers outlive it for the other ranks."""
    if rank == 1:
        deadline = time.monotonic() + 100
        while not (folder / "rank 0 has left").exists():
            assert time.monotonic() < deadline, "rank 0 waits for rank 1"
            time.sleep(0.01)
        alone = torch.ones(ELEMENTS)
        bps.synchronize(bps.push_pull_async_inplace(alone, name="alone", group=[1]))
    dist.destroy_process_group()
    if not c10d:
        bps.shutdown()
    assert not bps.is_initialized()
    (folder / f"rank {rank} has left").touch()
