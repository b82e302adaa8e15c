"""The results section of a document, written anew from recorded runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.kit.record import topology_text
from bench.pushpull.gates import judge_all
from bench.pushpull.sets import Experiment
from bench.pushpull.summary import Run
from bench.pushpull.tables import gate_table, ratio_table, result_table
from scripts.columns import pipes

BEGIN = "<!-- results: written by `make bench MARKDOWN=...`, not by hand -->"
END = "<!-- end of results -->"


def section(experiment: Experiment, run: Run) -> list[str]:
    """What one experiment came to."""
    rounds = len({launch.index for launch in run.counted})
    made = len({launch.index for launch in run.launches})
    counted = f"{rounds} launches of each, interleaved"
    if made > rounds:
        counted += f" ({made - rounds} more were left out: the machine was too busy)"
    if not run.quiet:
        counted += " (**the machine was too busy in all of them**)"
    # Where nothing else was measured there are no ratios.
    tables = result_table(run), ratio_table(run), gate_table(judge_all(experiment.gates, run))
    return [
        f"### {experiment.name}",
        "",
        f"{experiment.why.capitalize()}. {topology_text(run.plan.topology)}. {counted}.",
        "",
        *[line for table in tables if len(table) > 1 for line in (*pipes(table), "")],
    ]


def results(pairs: Sequence[tuple[Experiment, Run]], meta: Mapping[str, str]) -> str:
    """All of them, with what the figures depend on."""
    lines = [f"- {name}: {text}" for name, text in meta.items()]
    for experiment, run in pairs:
        lines += ["", *section(experiment, run)]
    return "\n".join(lines).rstrip()


def replace_results(path: Path, text: str) -> None:
    """Put the text between the marks of a document. Raises ValueError when it has none."""
    whole = path.read_text(encoding="utf-8")
    before, begin, rest = whole.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} lacks the lines {BEGIN!r} and {END!r}, between which to write")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
