"""A rank that times all-reduces: ``python -m bench.frameworks.call_rank SPEC RESULT``.

SPEC is JSON: ``bytes``, ``calls``, ``rendezvous`` and ``timeout_s``. Rank 0 writes RESULT, the
microseconds of CPU time of its main thread by form.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import byteps.torch as bps
import torch
import torch.distributed as dist
from byteps import c10d_plugin

WARM_UP = 20


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
    took: dict[str, list[float]] = {form: [] for form in forms}
    for number in range(spec["calls"] + WARM_UP):
        for form, call in forms.items():
            begin = time.thread_time_ns()
            call()
            if number >= WARM_UP:
                took[form].append((time.thread_time_ns() - begin) / 1e3)
    through_servers = bps.get_metrics()["byteps_worker_operations_total"]
    if through_servers != 2 * (spec["calls"] + WARM_UP):
        raise SystemExit(f"only {through_servers:g} all-reduces went through the server")
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(took), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
