"""A rank that times all-reduces: ``python -m bench.frameworks.call_rank SPEC RESULT``.

SPEC is JSON: ``bytes``, ``calls``, ``device``, ``rendezvous`` and ``timeout_s``. Rank 0 writes
RESULT, the microseconds of each call by form. All go through the servers first. On a CPU those that
are timed find an engine that has nothing to do; on a GPU they start all-reduces, which are awaited
outside the timed part.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import byteps.torch as bps
import torch
import torch.distributed as dist
from byteps import c10d_plugin
from byteps.torch import c_lib

ROUNDS = 5


def on_cpu(spec: dict[str, Any]) -> dict[str, list[float]]:
    """Of both forms, without the engine."""
    (nbytes,) = spec["bytes"]
    tensor = torch.zeros(nbytes // 4)
    forms: dict[str, Callable[[], object]] = {
        "push_pull_inplace": lambda: bps.push_pull_inplace(tensor, average=False, name="tensor"),
        "all_reduce": lambda: dist.all_reduce(tensor),
    }
    for call in forms.values():
        for _ in range(ROUNDS):
            call()
    done = bps.get_metrics()["byteps_worker_operations_total"]
    if done != len(forms) * ROUNDS:
        raise SystemExit(f"{done:g} all-reduces went through the server, not all")
    took: dict[str, list[float]] = {form: [] for form in forms}
    handles = itertools.count(1 << 40)
    with (
        mock.patch.object(c_lib, "push_pull", lambda *arguments: next(handles)),
        mock.patch.object(c_lib, "wait", lambda *arguments: None),
    ):
        for _ in range(spec["calls"]):
            for form, call in forms.items():
                begin = time.perf_counter_ns()
                call()
                took[form].append((time.perf_counter_ns() - begin) / 1e3)
    return took


def on_gpu(spec: dict[str, Any], rank: int) -> dict[str, list[float]]:
    """Of starting an all-reduce of each size: what the host spends before it goes on.

    Raises SystemExit where a sum is wrong or did not go through the servers.
    """
    took: dict[str, list[float]] = {}
    started = 0
    for nbytes in spec["bytes"]:
        tensor = torch.empty(nbytes // 4, device="cuda")
        calls = took[f"all_reduce of {nbytes / 2**20:g} MiB"] = []
        for number in range(ROUNDS + spec["calls"]):
            tensor.fill_(rank + number)
            torch.cuda.synchronize()
            dist.barrier()
            begin = time.perf_counter_ns()
            work = dist.all_reduce(tensor, async_op=True)
            spent = (time.perf_counter_ns() - begin) / 1e3
            work.wait()
            if not bool((tensor == 2 * number + 1).all()):
                raise SystemExit(f"all-reduce {number} of {nbytes} bytes is wrong")
            if number >= ROUNDS:
                calls.append(spent)
        started += ROUNDS + spec["calls"]
    dist.barrier()
    done = bps.get_metrics()["byteps_worker_operations_total"]
    if done < started - 1:  # the last one's count may come after its values
        raise SystemExit(f"{done:g} all-reduces went through the servers, not {started}")
    return took


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if spec["device"] == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    c10d_plugin.install()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if spec["device"] == "cuda" else "gloo",
        init_method=f"file://{spec['rendezvous']}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=spec["timeout_s"]),
    )
    took = on_gpu(spec, rank) if spec["device"] == "cuda" else on_cpu(spec)
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(took), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
