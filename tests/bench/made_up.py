"""Runs that nobody measured: a case, and seconds by backend, launch and iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.kit.plan import Case, Plan, Topology
from bench.pushpull.launch import Launch
from bench.pushpull.measure import Measured
from bench.pushpull.summary import Run

CASE = Case(size=1 << 20, dtype="float32", iters=3, warmup=1)
SAMPLES = {"byteps": [[1.0, 1.1], [1.05, 1.0]], "gloo": [[1.5, 1.6], [1.55, 1.5]]}
QUIET, MAX_BUSY = 0.1, 0.8


def make_run(
    samples: Mapping[str, Sequence[Sequence[float]]] = SAMPLES,
    *,
    busy: Mapping[int, float] | None = None,
    wrong: int = 0,
    link_bits: int = 8 << 20,
) -> Run:
    """Four workers and four servers; ``busy`` says how busy the machine was, by launch."""
    topology = Topology(workers=4, servers=4, emulated_hosts=8, link_bits=link_bits)
    plan = Plan(
        cases=(CASE,),
        topology=topology,
        backends=tuple(samples),
        device="cuda" if any(name.startswith("nccl") for name in samples) else "cpu",
        max_busy=MAX_BUSY,
    )
    run = Run(plan=plan, name="made-up")
    for backend, launches in samples.items():
        for index, seconds in enumerate(launches):
            measured = Measured(
                case=CASE,
                samples_s=list(seconds),
                wrong=wrong,
                worker_cpu_s=0.3,
                node_cpu_s=0.1 if backend == "byteps" else None,
                busy=(busy or {}).get(index, QUIET),
            )
            kept = measured.busy <= MAX_BUSY
            run.launches.append(
                Launch(backend=backend, index=index, measured=[measured], kept=kept)
            )
    return run
