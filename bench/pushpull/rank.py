"""A worker that the benchmark started: ``python -m bench.pushpull.rank SPEC RESULT``.

SPEC is JSON: the plan, the backend, the pids of servers and scheduler, and the file by which the
ranks find each other. Rank 0 writes RESULT, a list of what was measured.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bench.kit.plan import Plan, plan_from_json
from bench.pushpull import backends
from bench.pushpull.measure import Measured, measure


def choose_device(plan: Plan) -> str:
    """Where this rank's tensors go: ``cpu``, or ``cuda`` with its own GPU made the current one."""
    if plan.device == "cuda":
        # Emulated hosts take this machine's GPUs round robin, and share them if need be.
        number = os.environ["LOCAL_RANK" if plan.topology.in_job else "RANK"]
        torch.cuda.set_device(int(number) % torch.cuda.device_count())
    return plan.device


def measure_cases(
    plan: Plan,
    backend: backends.Backend,
    *,
    one_clock: bool,
    node_pids: Sequence[int] = (),
    first_round: int = 0,
) -> list[Measured]:
    """Measure every case through a backend; empty on ranks other than 0."""
    device = choose_device(plan)
    outcomes = [
        measure(
            case,
            backend,
            device=device,
            one_clock=one_clock,
            node_pids=node_pids,
            label=f"bench.{index}",
            first_round=first_round,
        )
        for index, case in enumerate(plan.cases)
    ]
    return [outcome for outcome in outcomes if outcome is not None]


def main(arguments: list[str]) -> int:
    spec_file, result_file = map(Path, arguments)
    spec = json.loads(spec_file.read_text())
    plan = plan_from_json(spec["plan"])
    # All on one machine: they meet in a file, which needs no free port.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec['rendezvous']}",
        rank=int(os.environ["RANK"]),
        world_size=plan.topology.workers,
        timeout=timedelta(seconds=plan.timeout_s),
    )
    choose_device(plan)
    backend = backends.make(spec["backend"], plan.device, spec.get("sockets"))
    outcomes = measure_cases(plan, backend, one_clock=True, node_pids=spec["node_pids"])
    backend.close()
    if dist.get_rank() == 0:
        part = result_file.with_suffix(".part")
        part.write_text(json.dumps([outcome.as_json() for outcome in outcomes]))
        part.rename(result_file)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
