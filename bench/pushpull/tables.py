"""What a run prints: aligned tables of figures, ratios and thresholds."""

from __future__ import annotations

from collections.abc import Sequence

from bench.kit.plan import Case
from bench.kit.units import show_size
from bench.pushpull.gates import Verdict
from bench.pushpull.summary import Ratio, Row, Run, percentile, ratio, rows

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
    """The first backend against each other one, case by case."""
    first, *others = run.plan.backends
    return [
        (case, first, other, ratio(run.of(first, case), run.of(other, case)))
        for case in run.plan.cases
        for other in others
    ]


def ratio_table(run: Run) -> list[Sequence[str]]:
    """How many times as fast the first backend is as each other one."""
    lines: list[Sequence[str]] = [RATIO_HEAD]
    for case, ours, theirs, found in ratio_pairs(run):
        lines.append(
            (
                show_size(case.size),
                case.type_name,
                ours,
                theirs,
                f"{found.value:.3f}",
                f"{found.low:.3f}..{found.high:.3f}",
                str(found.launches),
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
    """The spread is that of the launches' medians."""
    medians = [percentile(one.samples_s, 50) * 1e3 for one in run.of(row.backend, row.case)]
    return [
        *(run.name, row.backend, show_size(row.case.size), f"{row.p50_s * 1e3:.3f}"),
        *(f"{min(medians):.3f}..{max(medians):.3f}", f"{row.algbw / 1e9:.3f}"),
        *(_maybe(row.of_limit, ".3f"), _maybe(row.of_sockets, ".3f")),
        *(_maybe(row.cpu_s_per_gb, ".2f"), str(row.wrong)),
    ]


def brief_tables(runs: Sequence[tuple[Run, Sequence[Verdict]]]) -> list[list[Sequence[str]]]:
    """One table of all figures of several runs, and one of their thresholds."""
    figures: list[Sequence[str]] = [BRIEF_HEAD]
    bars: list[Sequence[str]] = [("experiment", *GATE_HEAD)]
    for run, verdicts in runs:
        figures += [_brief_cells(run, row) for row in rows(run)]
        bars += [[run.name, *gate_cells(verdict)] for verdict in verdicts]
    return [figures, bars]
