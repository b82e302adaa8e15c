"""Thresholds that a run must reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.kit.plan import Case
from bench.kit.units import show_size
from bench.pushpull.summary import Ratio, Run, cpu_s_per_gb, ratio, row


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A figure of BytePS, and the bounds that it must keep."""

    kind: str
    """``ratio``: times as fast as the base; ``of-limit``: part of what the links allow; ``cpu``:
    CPU seconds for a GB, over the base's; ``speed``: GB per second; ``cpu-seconds``: for a GB,
    of all processes of the job."""
    case: Case
    """BytePS's."""
    base: str = "gloo"
    """The backend to compare with."""
    base_case: Case | None = None
    """The base's; None: the same."""
    low: float | None = None
    high: float | None = None

    @property
    def title(self) -> str:
        what = f"{show_size(self.case.size)} {self.case.type_name}"
        if self.kind == "of-limit":
            return f"{what}: fraction of link bandwidth"
        if self.kind == "speed":
            return f"{what}: GB/s"
        if self.kind == "cpu-seconds":
            return f"{what}: CPU seconds per GB"
        base = self.base_case or self.case
        same = base.dtype == self.case.dtype and base.size == self.case.size
        against = self.base if same else f"{self.base} {show_size(base.size)} {base.dtype}"
        measure = "speed" if self.kind == "ratio" else "CPU seconds per GB"
        return f"{what}: {measure} over that of {against}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a gate found."""

    gate: Gate
    value: float | None
    """None: the run has no such figure, which is a miss."""
    spread: Ratio | None = None

    @property
    def ok(self) -> bool:
        gate = self.gate
        if self.value is None:
            return False
        above = gate.low is None or self.value >= gate.low
        return above and (gate.high is None or self.value <= gate.high)


def judge(gate: Gate, run: Run) -> Verdict:
    """Hold a run against a gate."""
    if gate.kind == "of-limit":
        return Verdict(gate=gate, value=row(run, "byteps", gate.case).of_limit)
    if gate.kind == "speed":
        return Verdict(gate=gate, value=row(run, "byteps", gate.case).algbw / 1e9)
    if gate.kind == "cpu-seconds":
        return Verdict(gate=gate, value=row(run, "byteps", gate.case).cpu_s_per_gb)
    ours = run.of("byteps", gate.case)
    theirs = run.of(gate.base, gate.base_case or gate.case)
    if gate.kind == "cpu":
        mine, base = cpu_s_per_gb(ours, "byteps"), cpu_s_per_gb(theirs, gate.base)
        return Verdict(gate=gate, value=mine / base if mine and base else None)
    spread = ratio(ours, theirs)
    return Verdict(gate=gate, value=spread.value, spread=spread)


def judge_all(gates: Sequence[Gate], run: Run) -> list[Verdict]:
    return [judge(gate, run) for gate in gates]
