"""A rank that times all-reduces: ``python -m bench.frameworks.call_rank SPEC RESULT``.

SPEC is JSON: ``bytes``, ``calls``, ``rendezvous`` and ``timeout_s``. Rank 0 writes RESULT, the
microseconds of each call by form. All go through the server first. Those that are timed find an
engine that has nothing to do.
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
from unittest import mock

import byteps.torch as bps
import torch
import torch.distributed as dist
from byteps import c10d_plugin
from byteps.torch import c_lib

ROUNDS = 5


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    c10d_plugin.install()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec['rendezvous']}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=spec["timeout_s"]),
    )
    tensor = torch.zeros(spec["bytes"] // 4)
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
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(took), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
