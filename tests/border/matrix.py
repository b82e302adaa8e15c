"""The matrix of interfaces and scenarios: verdicts on its cells, and their table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.border import interfaces, scenarios
from tests.layouts.job import Job

PAUSES_S = {"late-rank": 30.0, "stopped-host": 12.0}
"""Length of the pause in seconds, by scenario."""
RANKS = 2
ROUNDS = 200
"""Number of times that a group is created, used and destroyed."""

MUST_COMPUTE = frozenset(
    {
        *("plain", "grad-scaler", "accumulation", "unused-parameters", "late-rank"),
        *("stopped-host", "group-made-again", "second-model"),
    }
)
"""Scenarios that no interface may refuse."""

DISCARDS = frozenset({"summed-once", "second-model", "group-made-again"})
"""Scenarios that end without a model, and without a group except the default group."""
MOST_HELD = 1
"""Largest number of tensors that a rank may hold at the end of these scenarios.
DistributedOptimizer holds one, in which its ranks agree on their parameters."""

NOT_SAYABLE = frozenset(
    (interface.name, scenario)
    for interface in interfaces.SERVED
    if not interface.takes_groups
    for scenario in ("group-made-again", "groups-in-opposite-order")
) | {("FSDP2 sharded", "group-made-again")}
"""Cells that no program can ask for. Most of these interfaces average over all ranks and take no
group. For "FSDP2 sharded" the reason is torch's DTensor: it remembers the first group of the same
ranks, and fails once that group is destroyed."""

REFUSED: dict[tuple[str, str], str] = {
    ("ServerOptimizer", "lbfgs"): r"AdamW and SGD.*not as LBFGS",
    ("ServerOptimizer", "added-later"): r"declared once",
    ("ServerOptimizer", "unfrozen-later"): r"needs a gradient now, but not when",
}
"""Cells that are refused on every rank, with a pattern of the error's text."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of a cell."""

    text: str
    """Text in the table."""
    is_good: bool


def cells() -> list[tuple[str, str]]:
    """List (interface, scenario) of all cells that a program can ask for."""
    every = [(i.name, s) for s in scenarios.SCENARIOS for i in interfaces.SERVED]
    return [cell for cell in every if cell not in NOT_SAYABLE]


def run_cell(folder: Path, interface: str, scenario: str, *, rounds: int = ROUNDS) -> Job:
    """Run a cell in a folder of its own, which must not exist."""
    settings = {
        "interface": interface,
        "scenario": scenario,
        "pause_s": PAUSES_S.get(scenario, 0.0),
        "rounds": rounds,
        "environment": {
            "BYTEPS_EMBEDDED_SERVERS": "1",
            "BYTEPS_PARTITION_BYTES": "4096",
            "BYTEPS_START_TIMEOUT_S": "100",
            **interfaces.make(interface).environment,
        },
    }
    job = Job(folder, "tests.border.cell:run", RANKS, settings)
    job.run()
    return job


def judge(job: Job, interface: str, scenario: str) -> Verdict:
    """Compare the ranks' results with gloo's results, or with the expected refusal."""
    results = job.results()
    errors = [result["error"] for result in results]
    pattern = REFUSED.get((interface, scenario))
    if any(result["reference_error"] for result in results):
        good = all(errors) and scenario not in MUST_COMPUTE
        return Verdict(text="not by gloo either", is_good=good)
    if any(errors):
        if pattern is None:
            return Verdict(text=f"fails: {errors}", is_good=False)
        good = all(re.search(pattern, error) for error in errors)
        return Verdict(text="refused" if good else f"fails: {errors}", is_good=good)
    if pattern is not None:
        return Verdict(text=f"computes, where {pattern!r} is expected", is_good=False)
    through = interfaces.make(interface)
    tolerance = through.tolerance
    ends = scenario in DISCARDS and not (
        through.sums_belong_to_group and scenario != "group-made-again"
    )
    for rank, result in enumerate(results):
        if result["pushed_bytes"] < result["reduced_bytes"]:
            sent, due = result["pushed_bytes"], result["reduced_bytes"]
            return Verdict(text=f"rank {rank} sent {sent} of {due} bytes", is_good=False)
        if ends and result["held"] > MOST_HELD:
            return Verdict(text=f"rank {rank} still holds {result['held']} tensors", is_good=False)
        different = _differences(result["reference"], result["values"], tolerance)
        if different:
            return Verdict(text=f"rank {rank} differs: {'; '.join(different)}", is_good=False)
    return Verdict(text="=" if tolerance == 0 else "≈", is_good=True)


def _differences(
    reference: dict[str, torch.Tensor], values: dict[str, torch.Tensor], tolerance: float
) -> list[str]:
    if reference.keys() != values.keys():
        return [f"other values: {sorted(reference.keys() ^ values.keys())}"]
    differing = []
    for name, wanted in reference.items():
        value = values[name]
        if not torch.isfinite(value).all():
            differing.append(f"{name} is not finite")
        elif not torch.allclose(value, wanted, rtol=tolerance, atol=tolerance):
            differing.append(f"{name} by {float((value - wanted).abs().max()):.3g}")
    return differing[:4]


def rows(
    verdicts: dict[tuple[str, str], Verdict], written: dict[tuple[str, str], str]
) -> list[list[str]]:
    """Make the table's rows. A scenario has a row if each of its cells has run now, or is in the
    table as `written`."""
    texts = {
        **written,
        **{cell: verdict.text for cell, verdict in verdicts.items()},
        **dict.fromkeys(NOT_SAYABLE, "no groups"),
    }
    every = [[(i.name, scenario) for i in interfaces.SERVED] for scenario in scenarios.SCENARIOS]
    return [
        [row[0][1], *(texts[cell] for cell in row)]
        for row in every
        if all(cell in texts for cell in row)
    ]


def names(argument: str) -> Sequence[str]:
    """-"""
    return [word for word in argument.split(",") if word]
