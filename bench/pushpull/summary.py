"""From samples to figures: medians, spreads and ratios over the launches of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.kit.plan import Case, Plan, through_servers
from bench.pushpull.launch import Launch
from bench.pushpull.limits import busiest_link, least_seconds
from bench.pushpull.measure import Measured


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least ``percent`` of all samples do not exceed."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(kw_only=True)
class Run:
    """A plan, and every launch that was made for it."""

    plan: Plan
    name: str = ""
    """Of the experiment, in a set of several."""
    launches: list[Launch] = field(default_factory=list)

    @property
    def quiet(self) -> list[Launch]:
        """The launches of rounds in which the machine was not too busy for any backend."""
        spoilt = {one.index for one in self.launches if not one.kept}
        return [one for one in self.launches if one.index not in spoilt]

    @property
    def counted(self) -> list[Launch]:
        """The quiet ones; all, for want of better, if none was."""
        return self.quiet or self.launches

    def of(self, backend: str, case: Case) -> list[Measured]:
        """A case's outcomes, one a counted launch, in their order."""
        position = self.plan.cases.index(case)
        ordered = sorted(self.counted, key=lambda one: one.index)
        return [one.measured[position] for one in ordered if one.backend == backend]

    @property
    def wrong(self) -> int:
        """Wrong elements in all launches, counted or not."""
        return sum(one.wrong for launch in self.launches for one in launch.measured)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case through a backend, over all counted launches."""

    backend: str
    case: Case
    workers: int
    servers: int | None
    p50_s: float
    """Median over the launches of each one's median."""
    p99_s: float
    """Of all iterations of all launches together."""
    algbw: float
    """Bytes a worker has summed, a second."""
    busbw: float | None
    """What each link carries each way, a second; for all-reduce, as nccl-tests has it."""
    of_limit: float | None
    """The least time that the links allow, over p50."""
    of_sockets: float | None
    """The time of plain sockets in the same run, over p50; None where they were not measured."""
    cpu_s_per_gb: float | None
    """CPU seconds of the whole job for each 1e9 bytes that a worker has summed."""
    wrong: int

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "case": self.case.__dict__}


def cpu_s_per_gb(outcomes: Sequence[Measured], backend: str) -> float | None:
    """Median over launches; None where a part of the job runs out of sight."""
    if through_servers(backend) and any(one.node_cpu_s is None for one in outcomes):
        return None
    return statistics.median(
        (one.worker_cpu_s + (one.node_cpu_s or 0.0)) * 1e9 / (one.case.size * one.case.iters)
        for one in outcomes
    )


def p50_s(outcomes: Sequence[Measured]) -> float:
    """Median of the launches' medians."""
    return statistics.median(percentile(one.samples_s, 50) for one in outcomes)


def row(run: Run, backend: str, case: Case) -> Row:
    outcomes = run.of(backend, case)
    topology, middle = run.plan.topology, p50_s(outcomes)
    sent = case.sent_bytes(backend)
    limit = least_seconds(backend, topology, sent)
    to_servers = through_servers(backend)
    sockets = run.of("sockets", case) if "sockets" in run.plan.backends else []
    return Row(
        backend=backend,
        case=case,
        workers=topology.workers,
        servers=topology.servers if to_servers else None,
        p50_s=middle,
        p99_s=percentile([sample for one in outcomes for sample in one.samples_s], 99),
        algbw=case.size / middle,
        busbw=None if to_servers else busiest_link(backend, topology) * sent / middle,
        of_limit=None if limit is None else limit / middle,
        of_sockets=p50_s(sockets) / middle if sockets else None,
        cpu_s_per_gb=cpu_s_per_gb(outcomes, backend),
        wrong=sum(one.wrong for one in outcomes),
    )


def rows(run: Run) -> list[Row]:
    """Every case through every backend."""
    return [row(run, backend, case) for case in run.plan.cases for backend in run.plan.backends]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as fast one is as the other."""

    value: float
    """The other's median of medians, over the one's."""
    low: float
    high: float
    """Least and largest of the launches, each against the other's launch of the same round."""
    launches: int


def ratio(ours: Sequence[Measured], theirs: Sequence[Measured]) -> Ratio:
    """``theirs`` over ``ours``: above 1, ours is faster. Both in the order of the rounds."""
    each = [
        percentile(b.samples_s, 50) / percentile(a.samples_s, 50)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return Ratio(
        value=p50_s(theirs) / p50_s(ours), low=min(each), high=max(each), launches=len(each)
    )
