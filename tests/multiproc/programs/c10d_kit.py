"""Helpers of torch.distributed programs: joining, values, counters of servers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import byteps.torch as bps
import torch
import torch.distributed as dist
from byteps import c10d_plugin
from torch import nn

from tests.multiproc.programs.devices import device_of
from tests.multiproc.programs.job import Job

LARGE = 40_000
"""Number of fp32 elements: more bytes than BYTEPS_C10D_MIN_BYTES."""


def initialize(job: Job, **named: Any) -> None:
    """Initialize torch.distributed with groups that use BytePS; `named`: arguments."""
    per_host = job.args.get("per_host")
    if per_host is not None:
        os.environ["BYTEPS_HOST_ID"] = f"host-{job.rank // per_host}"
    c10d_plugin.install()
    if on_gpu(job):
        torch.set_default_device(device_of(job))
        # Ranks on the same GPU must look like different hosts, or NCCL refuses them.
        os.environ["NCCL_HOSTID"] = f"machine{job.rank // torch.cuda.device_count()}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    init_process_group(job, **named)


def init_process_group(job: Job, **named: Any) -> None:
    """Initialize torch.distributed like a script whose ranks meet in a file."""
    settings = {
        "backend": native_backend(job),
        "init_method": f"file://{job.folder}/store",
        "rank": job.rank,
        "world_size": job.size,
        "timeout": timedelta(seconds=200),
    }
    if "store" in named:
        del settings["init_method"]
    dist.init_process_group(**{**settings, **named})


def tcp_store(job: Job) -> dist.TCPStore:
    """Return a store like torchrun's, whose client serves one thread at a time."""
    port = job.folder / "store.port"
    limit = timedelta(seconds=200)
    if job.rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", 0, job.size, is_master=True, timeout=limit, wait_for_workers=False
        )
        job.note("port", str(store.port))
        (job.folder / "port.0").rename(port)
        return store
    job.wait_until("the store's port", port.exists)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), job.size, timeout=limit)


def on_gpu(job: Job) -> bool:
    return job.args.get("device") == "cuda"


def native_backend(job: Job) -> str:
    return "cpu:gloo,cuda:nccl" if on_gpu(job) else "gloo"


def given(elements: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small integers: exact in every tested type, for any order of additions."""
    return ((torch.arange(elements) * 7 + rank * 3) % 5).to(dtype)


def total(elements: int, ranks: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sum(given(elements, rank) for rank in ranks).to(dtype)  # type: ignore[union-attr]


def through_servers() -> int:
    if torch.cuda.is_initialized():  # Streams wait for sums. The host does not wait.
        torch.cuda.synchronize()
        while bps.get_metrics()["byteps_worker_running_operations"]:
            time.sleep(0.001)
    return int(bps.get_metrics()["byteps_worker_operations_total"])


def whole_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Copy the parameters of an FSDP2 model. All ranks must call this together."""
    parameters: list[Any] = list(model.parameters())
    return [parameter.full_tensor().detach().clone() for parameter in parameters]


@contextlib.contextmanager
def natively() -> Iterator[None]:
    """Context in which new groups do not use BytePS."""
    made = dist.distributed_c10d._new_process_group_helper
    dist.distributed_c10d._new_process_group_helper = made.__wrapped__  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.distributed_c10d._new_process_group_helper = made
