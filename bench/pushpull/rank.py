"""Measurements of a rank, and the worker program that the benchmark starts.

``python -m bench.pushpull.rank SPEC RESULT``: SPEC is JSON with the plan, the backend, the pids of
servers and scheduler, and the file through which ranks meet. Rank 0 writes RESULT, a list of
results.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.kit import record
from bench.kit.pattern import Pattern
from bench.kit.plan import Case, Plan, plan_from_json
from bench.pushpull.backends import Backend, make


@dataclass(kw_only=True)
class Measured:
    """Result of a case with a backend in one launch, over all ranks."""

    case: Case
    samples_s: list[float]
    """Seconds of each timed iteration, of the slowest rank."""
    wrong: int
    """Number of wrong elements, over all ranks and iterations, including warm-up."""
    worker_cpu_s: float
    """CPU time of all workers in the timed iterations."""
    node_cpu_s: float | None
    """CPU time of all servers and the scheduler; None if it is unknown."""
    busy: float
    """Busy fraction of rank 0's machine, including other processes."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(kw_only=True)
class _Seen:
    """Record of a rank."""

    spans_ns: list[tuple[int, int]] = field(default_factory=list)
    wrong: int = 0
    cpu_ns: int = 0


def iteration_seconds(spans: Sequence[tuple[int, int]], *, one_clock: bool) -> float:
    """Return the duration of an iteration, from each rank's begin and end in ns.

    With a common clock, an iteration lasts from the begin of the last rank to the end of the last
    rank, because earlier ranks only wait. With separate clocks, it is the longest of the ranks'
    times.
    """
    if one_clock:
        return (max(end for _, end in spans) - max(begin for begin, _ in spans)) / 1e9
    return max(end - begin for begin, end in spans) / 1e9


def _finish(device: str) -> None:
    """Wait for the work that is queued on the caller's stream."""
    if device == "cuda":
        torch.cuda.current_stream().synchronize()


def measure(
    case: Case,
    backend: Backend,
    *,
    device: str,
    one_clock: bool,
    node_pids: Sequence[int],
    label: str,
    first_round: int = 0,
) -> Measured | None:
    """Run a case. All ranks call this, in torch.distributed's default group (gloo).

    Args:
        one_clock: whether all ranks are on this machine.
        node_pids: pids of servers and scheduler if they are on this machine.
        label: name that distinguishes this case's tensors from others.
        first_round: number that differs each time a label is measured, so that a stale sum is
            detected.

    Returns:
        the result on rank 0, None on other ranks.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pattern = Pattern(
        rank=rank,
        ranks=ranks,
        size=case.size,
        dtype=case.dtype,
        device=device,
        form=backend.form(case.wire),
    )
    lengths = case.lengths()
    offsets = [sum(lengths[:index]) for index in range(len(lengths))]
    tensors = [torch.empty(n, dtype=getattr(torch, case.dtype), device=device) for n in lengths]
    seen, node_cpu_ns, busy = _Seen(), 0, record.Ticks(busy=0, all=0)
    for iteration in range(case.warmup + case.iters):
        round_ = first_round + iteration
        if backend.sums:
            for tensor, offset in zip(tensors, offsets, strict=True):
                pattern.fill(tensor, round_, offset)
        _finish(device)
        nodes, ticks = record.total_cpu_ns(node_pids), record.ticks()
        dist.barrier()
        cpu, begin = time.process_time_ns(), time.monotonic_ns()
        backend.reduce(tensors, label, case.wire)
        _finish(device)
        end, cpu = time.monotonic_ns(), time.process_time_ns() - cpu
        dist.barrier()
        if iteration >= case.warmup:
            seen.spans_ns.append((begin, end))
            seen.cpu_ns += cpu
            node_cpu_ns += record.total_cpu_ns(node_pids) - nodes
            busy += record.ticks() - ticks
        if not backend.sums:
            continue
        for tensor, offset in zip(tensors, offsets, strict=True):
            seen.wrong += pattern.count_wrong(tensor, round_, offset)
    everyone: list[_Seen | None] | None = [None] * ranks if rank == 0 else None
    dist.gather_object(seen, everyone)
    if everyone is None:
        return None
    all_seen = [seen for seen in everyone if seen is not None]
    spans = zip(*(seen.spans_ns for seen in all_seen), strict=True)
    return Measured(
        case=case,
        samples_s=[iteration_seconds(span, one_clock=one_clock) for span in spans],
        wrong=sum(seen.wrong for seen in all_seen),
        worker_cpu_s=sum(seen.cpu_ns for seen in all_seen) / 1e9,
        node_cpu_s=node_cpu_ns / 1e9 if node_pids else None,
        busy=busy.fraction,
    )


def choose_device(plan: Plan) -> str:
    """Return the device of this rank's tensors: ``cpu``, or ``cuda``. For ``cuda`` the rank's GPU
    is selected."""
    if plan.device == "cuda":
        # Emulated hosts take this machine's GPUs round robin. They share them if necessary.
        number = os.environ["LOCAL_RANK" if plan.topology.in_job else "RANK"]
        torch.cuda.set_device(int(number) % torch.cuda.device_count())
    return plan.device


def measure_cases(
    plan: Plan,
    backend: Backend,
    *,
    one_clock: bool,
    node_pids: Sequence[int] = (),
    first_round: int = 0,
) -> list[Measured]:
    """Measure every case with a backend. Return an empty list on ranks other than 0."""
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
    # All ranks are on one machine, so they meet in a file, which needs no free port.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec['rendezvous']}",
        rank=int(os.environ["RANK"]),
        world_size=plan.topology.workers,
        timeout=timedelta(seconds=plan.timeout_s),
    )
    choose_device(plan)
    backend = make(spec["backend"], plan.device, spec.get("sockets"))
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
