"""The results section of a document, written anew from recorded runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mode

from bench.kit.plan import Case
from bench.kit.units import show_size
from bench.pushpull.gates import judge_all
from bench.pushpull.sets import Experiment
from bench.pushpull.summary import Ratio, Run, p50_s, ratio, row
from bench.pushpull.tables import gate_cells
from scripts.columns import pipes

BEGIN = "<!-- results: written by `make bench MARKDOWN=...`, not by hand -->"
END = "<!-- end of results -->"
HEAD = ("experiment", "size", "ms", "of-limit", "backend", "its ms", "ratio", "min..max")
"""``ms`` and ``of-limit`` are BytePS's; ``ratio`` is how many times as fast it is."""


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.4g}"


def _against(run: Run, case: Case) -> Iterator[tuple[str, str, Ratio | None]]:
    """Each other backend, its time, and how many times as fast the first one is."""
    first, *others = run.plan.backends
    for other in others:
        outcomes = run.of(other, case)
        yield other, _ms(p50_s(outcomes)), ratio(run.of(first, case), outcomes)
    if not others:
        yield "-", "-", None


def _spread(found: Ratio | None) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    return f"{found.value:.3f}", f"{found.low:.3f}..{found.high:.3f}"


def lines_of(experiment: Experiment, run: Run) -> list[Sequence[str]]:
    """A row for each case and each backend that BytePS is compared with."""
    lines: list[Sequence[str]] = []
    for case in run.plan.cases:
        ours = row(run, run.plan.backends[0], case)
        limit = "-" if ours.of_limit is None else f"{ours.of_limit:.3f}"
        head = (experiment.name, f"{show_size(case.size)} {case.type_name}", _ms(ours.p50_s), limit)
        for other, its, found in _against(run, case):
            lines.append((*head, other, its, *_spread(found)))
    return lines


def launches_of(pairs: Sequence[tuple[Experiment, Run]]) -> str:
    """How many launches of each backend count, and of which experiments others do, and why."""
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
    """How many thresholds are met, and those that are not."""
    verdicts = [(one, v) for one, run in pairs for v in judge_all(one.gates, run)]
    good = sum(verdict.ok for _, verdict in verdicts)
    text = f"Thresholds met: {good} of {len(verdicts)}."
    for experiment, verdict in verdicts:
        if not verdict.ok:
            title, bounds, value, *_ = gate_cells(verdict)
            text += f" MISS: {experiment.name}, {title}: {value}, must be {bounds}."
    return text


def results(pairs: Sequence[tuple[Experiment, Run]], meta: Mapping[str, str]) -> str:
    """One table of all, with what the figures depend on."""
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


def replace_results(path: Path, text: str) -> None:
    """Put the text between the marks of a document. Raises ValueError when it has none."""
    whole = path.read_text(encoding="utf-8")
    before, begin, rest = whole.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} lacks the lines {BEGIN!r} and {END!r}, between which to write")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
