"""Thresholds of a run, and tables for printing and for documents."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mode

import torch

from bench.kit.plan import Case, Plan
from bench.kit.record import show_size
from bench.pushpull.launch import Ratio, Row, Run, cpu_s_per_gb, p50_s, percentile, ratio, row, rows
from scripts.progress import pipes


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Figure of BytePS, with its thresholds."""

    kind: str
    """Kind of the figure. ``ratio``: speed relative to the base; ``of-limit``: fraction of link
    bandwidth; ``cpu``: CPU seconds per GB, relative to the base; ``speed``: GB per second;
    ``cpu-seconds``: per GB, of all processes of the job."""
    case: Case
    """Case of BytePS."""
    base: str = "gloo"
    """Backend to compare with."""
    base_case: Case | None = None
    """Case of the base; None: the same case."""
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
    """Result of a gate."""

    gate: Gate
    value: float | None
    """Value of the figure. None: the run has no such figure, which counts as a miss."""
    spread: Ratio | None = None

    @property
    def ok(self) -> bool:
        gate = self.gate
        if self.value is None:
            return False
        above = gate.low is None or self.value >= gate.low
        return above and (gate.high is None or self.value <= gate.high)


def judge(gate: Gate, run: Run) -> Verdict:
    """Check a run against a gate."""
    if gate.kind == "of-limit":
        return Verdict(gate=gate, value=row(run, "byteps", gate.case).of_limit)
    if gate.kind == "speed":
        return Verdict(gate=gate, value=row(run, "byteps", gate.case).algbw / 1e9)
    if gate.kind == "cpu-seconds":
        return Verdict(gate=gate, value=row(run, "byteps", gate.case).cpu_s_per_gb)
    ours = run.of("byteps", gate.case)
    theirs = run.of(gate.base, gate.base_case or gate.case)
    if gate.kind == "cpu":
        own, base = cpu_s_per_gb(ours, "byteps"), cpu_s_per_gb(theirs, gate.base)
        return Verdict(gate=gate, value=own / base if own and base else None)
    spread = ratio(ours, theirs)
    return Verdict(gate=gate, value=spread.value, spread=spread)


def judge_all(gates: Sequence[Gate], run: Run) -> list[Verdict]:
    return [judge(gate, run) for gate in gates]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Plan, its purpose, and its thresholds."""

    name: str
    why: str
    plan: Plan
    gates: Sequence[Gate]
    processors: int = 1
    """Number of cores that the experiment needs. With fewer, the cores would be the bottleneck, not
    the links."""

    def of_launches(self, launches: int) -> Experiment:
        """Return this experiment with another number of launches."""
        return replace(self, plan=replace(self.plan, launches=launches, retries=launches))


def demand_hardware(experiments: Sequence[Experiment]) -> None:
    """Raise ValueError for experiments that this machine cannot measure."""
    there = len(os.sched_getaffinity(0))
    for experiment in experiments:
        if there < experiment.processors:
            raise ValueError(
                f"{experiment.name} needs {experiment.processors} cores, and there are {there}: "
                "run it on a larger machine, or show what was recorded there with --from-json"
            )
        if experiment.plan.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"{experiment.name} needs a GPU, and torch finds none: take the same experiments "
                "of CPU tensors (--set fast), or show what was recorded elsewhere with --from-json"
            )


RESULT_HEAD = (
    *("size", "count", "type", "backend", "workers", "servers", "p50 ms", "p99 ms"),
    *("algbw GB/s", "busbw GB/s", "of-limit", "of-sockets", "cpu_s/GB", "#wrong"),
)
RATIO_HEAD = ("size", "type", "ours", "theirs", "ratio", "min..max", "launches")
GATE_HEAD = ("threshold", "must be", "is", "min..max", "")


def _maybe(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def result_cells(row: Row) -> list[str]:
    return [
        show_size(row.case.size),
        str(row.case.count),
        row.case.type_name,
        row.backend,
        str(row.workers),
        "-" if row.servers is None else str(row.servers),
        f"{row.p50_s * 1e3:.3f}",
        f"{row.p99_s * 1e3:.3f}",
        f"{row.algbw / 1e9:.4f}",
        _maybe(None if row.busbw is None else row.busbw / 1e9, ".4f"),
        _maybe(row.of_limit, ".3f"),
        _maybe(row.of_sockets, ".3f"),
        _maybe(row.cpu_s_per_gb, ".2f"),
        str(row.wrong),
    ]


def result_table(run: Run) -> list[Sequence[str]]:
    return [RESULT_HEAD, *map(result_cells, rows(run))]


def ratio_pairs(run: Run) -> list[tuple[Case, str, str, Ratio]]:
    """Return the ratio of the first backend to each other one, case by case."""
    first, *others = run.plan.backends
    return [
        (case, first, other, ratio(run.of(first, case), run.of(other, case)))
        for case in run.plan.cases
        for other in others
    ]


def ratio_table(run: Run) -> list[Sequence[str]]:
    lines: list[Sequence[str]] = [RATIO_HEAD]
    for case, ours, theirs, median in ratio_pairs(run):
        lines.append(
            (
                show_size(case.size),
                case.type_name,
                ours,
                theirs,
                f"{median.value:.3f}",
                f"{median.low:.3f}..{median.high:.3f}",
                str(median.launches),
            )
        )
    return lines


def gate_cells(verdict: Verdict) -> list[str]:
    gate, spread = verdict.gate, verdict.spread
    bounds = [f">= {gate.low:g}"] if gate.low is not None else []
    bounds += [f"<= {gate.high:g}"] if gate.high is not None else []
    return [
        gate.title,
        ", ".join(bounds),
        _maybe(verdict.value, ".3f"),
        f"{spread.low:.3f}..{spread.high:.3f}" if spread else "-",
        "ok" if verdict.ok else "MISS",
    ]


def gate_table(verdicts: Sequence[Verdict]) -> list[Sequence[str]]:
    return [GATE_HEAD, *map(gate_cells, verdicts)]


BRIEF_HEAD = (
    *("experiment", "backend", "size", "p50 ms", "min..max", "GB/s", "of-limit", "of-sockets"),
    *("cpu_s/GB", "#wrong"),
)


def _brief_cells(run: Run, row: Row) -> list[str]:
    """Return the cells of a row. The spread is that of the launches' medians."""
    medians = [percentile(outcome.samples_s, 50) * 1e3 for outcome in run.of(row.backend, row.case)]
    return [
        *(run.name, row.backend, show_size(row.case.size), f"{row.p50_s * 1e3:.3f}"),
        *(f"{min(medians):.3f}..{max(medians):.3f}", f"{row.algbw / 1e9:.3f}"),
        *(_maybe(row.of_limit, ".3f"), _maybe(row.of_sockets, ".3f")),
        *(_maybe(row.cpu_s_per_gb, ".2f"), str(row.wrong)),
    ]


def brief_tables(runs: Sequence[tuple[Run, Sequence[Verdict]]]) -> list[list[Sequence[str]]]:
    """Return a table of all figures of several runs, and a table of their thresholds."""
    figures: list[Sequence[str]] = [BRIEF_HEAD]
    bars: list[Sequence[str]] = [("experiment", *GATE_HEAD)]
    for run, verdicts in runs:
        figures += [_brief_cells(run, row) for row in rows(run)]
        bars += [[run.name, *gate_cells(verdict)] for verdict in verdicts]
    return [figures, bars]


BEGIN = "<!-- results: written by `make bench MARKDOWN=...`, not by hand -->"
END = "<!-- end of results -->"
HEAD = ("experiment", "size", "ms", "of-limit", "backend", "its ms", "ratio", "min..max")
"""Columns of a table. ``ms`` and ``of-limit`` are BytePS's, and ``ratio`` is BytePS's relative
speed."""


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.4g}"


def _against(run: Run, case: Case) -> Iterator[tuple[str, str, Ratio | None]]:
    """Yield, for each other backend, its name, its time, and BytePS's relative speed."""
    first, *others = run.plan.backends
    for other in others:
        outcomes = run.of(other, case)
        yield other, _ms(p50_s(outcomes)), ratio(run.of(first, case), outcomes)
    if not others:
        yield "-", "-", None


def _spread(median: Ratio | None) -> tuple[str, str]:
    if median is None:
        return "-", "-"
    return f"{median.value:.3f}", f"{median.low:.3f}..{median.high:.3f}"


def lines_of(experiment: Experiment, run: Run) -> list[Sequence[str]]:
    """Return a row for each case and each backend with which BytePS is compared."""
    lines: list[Sequence[str]] = []
    for case in run.plan.cases:
        ours = row(run, run.plan.backends[0], case)
        limit = "-" if ours.of_limit is None else f"{ours.of_limit:.3f}"
        head = (experiment.name, f"{show_size(case.size)} {case.type_name}", _ms(ours.p50_s), limit)
        for other, its, median in _against(run, case):
            lines.append((*head, other, its, *_spread(median)))
    return lines


def launches_of(pairs: Sequence[tuple[Experiment, Run]]) -> str:
    """Describe how many launches of each backend count. Name the experiments that differ, and
    why."""
    counts = [len({launch.index for launch in run.counted}) for _, run in pairs]
    usual = mode(counts)
    text = f"{usual}"
    for (experiment, run), rounds in zip(pairs, counts, strict=True):
        made = len({launch.index for launch in run.launches})
        if made > rounds:
            text += f"; {experiment.name}: {rounds}, {made - rounds} more on a busy machine"
        elif not run.quiet:
            text += f"; {experiment.name}: {rounds}, **all on a busy machine**"
        elif rounds != usual:
            text += f"; {experiment.name}: {rounds}"
    return text


def missed(pairs: Sequence[tuple[Experiment, Run]]) -> str:
    """Describe how many thresholds are reached. Name those that are missed."""
    verdicts = [
        (experiment, v) for experiment, run in pairs for v in judge_all(experiment.gates, run)
    ]
    good = sum(verdict.ok for _, verdict in verdicts)
    text = f"Thresholds met: {good} of {len(verdicts)}."
    for experiment, verdict in verdicts:
        if not verdict.ok:
            title, bounds, value, *_ = gate_cells(verdict)
            text += f" MISS: {experiment.name}, {title}: {value}, must be {bounds}."
    return text


def results(pairs: Sequence[tuple[Experiment, Run]], meta: Mapping[str, str]) -> str:
    """Return a table of all experiments, with metadata."""
    table: list[Sequence[str]] = [HEAD]
    for experiment, run in pairs:
        table += lines_of(experiment, run)
    wrong = sum(run.wrong for _, run in pairs)
    return "\n".join(
        [
            *(f"- {name}: {text}" for name, text in meta.items()),
            f"- launches of each backend, interleaved: {launches_of(pairs)}",
            f"- wrong elements: {wrong}",
            "",
            *pipes(table),
            "",
            missed(pairs),
        ]
    )
