"""Compares the backend of torch.distributed with gloo by PyTorch's own tests of it.

    build/venv/bin/python -m tests.pytorch.run [--modes NAME ...] [--tests NAME ...]
        [--markdown docs/results/border.md]

Each test in PyTorch's wheel runs over a reference and, with BYTEPS_C10D_MIN_BYTES=1, through
servers. A test that passes over the reference alone is a fault, unless KNOWN has the reason.

The reference is gloo. For values in few bits the reference is a run in which the same codec rounds
the input and the result of each rank, and nothing is rounded on the wire. Only tests whose
tolerance exceeds the rounding pass there, and only these count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.progress import Progress
from tests.layouts.table import Table

ROOT = Path(__file__).parents[2]

SHAPES = "input_shapes of the event of an all-reduce"
KNOWN: dict[str, str] = {
    SHAPES: "torch records shapes from Python only for events that begin and end on one thread: "
    "they stand at the event of the call, `c10d::allreduce_`"
}
"""Tests, or checks of many tests, that pass over gloo alone. Each has its reason."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A placement of ranks, and a wire dtype."""

    name: str
    ranks: int
    per_host: int = 1
    wire: str = "same"

    @property
    def reference(self) -> str:
        """Get a backend of the runner."""
        return "gloo" if self.wire == "same" else "rounded"

    def options(self) -> list[str]:
        """Get options of the runner."""
        return [
            *("--ranks", str(self.ranks), "--per-host", str(self.per_host)),
            *("--wire", self.wire, "--stand-in"),
        ]


MODES = {
    mode.name: mode
    for mode in (
        Mode(name="flat", ranks=2),
        Mode(name="node-first", ranks=4, per_host=2),
        Mode(name="int8", ranks=2, wire="int8"),
    )
}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A test on both backends."""

    test: str
    reference: str
    byteps: str
    operations: int
    """Number of all-reduces that went through servers, on all ranks."""
    error: str
    without_shapes: bool

    @property
    def is_different(self) -> bool:
        """Whether the test passes over the reference, but not through servers."""
        return self.reference == "passed" != self.byteps


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All tests in a mode."""

    mode: Mode
    compared: list[Compared] = field(default_factory=list)

    @property
    def faults(self) -> list[Compared]:
        """List tests that pass over the reference alone, without a known reason."""
        return [
            outcome
            for outcome in self.compared
            if outcome.is_different and outcome.test not in KNOWN
        ]

    @property
    def stale(self) -> list[str]:
        """List entries of KNOWN that this run could have shown and did not."""
        seen = {outcome.test for outcome in self.compared if outcome.is_different}
        if any(outcome.without_shapes for outcome in self.compared):
            seen.add(SHAPES)
        could = {outcome.test for outcome in self.compared if outcome.reference == "passed"} | {
            SHAPES
        }
        return [name for name in KNOWN if name in could - seen]

    def cells(self) -> list[str]:
        passed = [outcome for outcome in self.compared if outcome.reference == "passed"]
        here = [outcome for outcome in passed if outcome.byteps == "passed"]
        return [
            self.mode.name,
            *map(
                str,
                (
                    self.mode.ranks,
                    len(self.compared),
                    len(passed),
                    len(here),
                    sum(outcome.operations > 0 for outcome in here),
                ),
            ),
        ]


def compare(mode: Mode, tests: Sequence[str] = ()) -> Verdict:
    """Run these tests, or all if empty, on both backends at the same time."""
    options = mode.options()
    if tests:
        options += ["--tests", *tests]
    title = f"pytorch, {mode.name}"
    with Progress(title, unit="tests") as progress, ThreadPoolExecutor() as pool:
        both = [
            pool.submit(_outcomes, backend, options, progress)
            for backend in (mode.reference, "byteps")
        ]
        reference, ours = (future.result() for future in both)
    compared = [
        Compared(
            test=name,
            reference=reference[name]["outcome"],
            byteps=seen["outcome"],
            operations=seen["operations"],
            error=seen["error"],
            without_shapes=seen["without_shapes"],
        )
        for name, seen in ours.items()
    ]
    return Verdict(mode=mode, compared=compared)


def _outcomes(
    backend: str, options: Sequence[str], progress: Progress
) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/pytorch/runner.py")]
    command += ["--backend", backend, *options]
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DMLC_", "BYTEPS_", "TORCHELASTIC_"))
    }
    outcomes: dict[str, dict[str, Any]] = {}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            outcome = json.loads(line)
            outcomes[outcome["test"]] = outcome
            progress.step(f"{backend}: {outcome['test']} {outcome['seconds']:.0f} s")
    if process.returncode != 0:
        raise SystemExit(f"error: the tests over {backend} ended with {process.returncode}")
    return outcomes


TABLE = Table(
    begin="<!-- begin: pytorch -->",
    head=[
        "mode",
        "ranks",
        "tests",
        "pass over the reference",
        "pass here",
        "of these send",
    ],
    align="lrrrrr",
    keys=list(MODES),
)


def main() -> int:
    """Run the comparison; the exit status is 0 if only tests of KNOWN differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--tests", nargs="*", default=[])
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    verdicts = [compare(MODES[name], options.tests) for name in options.modes]
    for verdict in verdicts:
        print(report(verdict))
    if options.markdown is not None:
        TABLE.put(options.markdown, [verdict.cells() for verdict in verdicts])
    return 1 if any(verdict.faults or verdict.stale for verdict in verdicts) else 0


def report(verdict: Verdict) -> str:
    """Describe the differences, with the errors of faults."""
    lines = [f"{outcome.test}: {outcome.byteps}\n{outcome.error}\n" for outcome in verdict.faults]
    lines += [", ".join(map(": ".join, zip(TABLE.head, verdict.cells(), strict=True)))]
    lines += [
        f"passes over {verdict.mode.reference} alone: {outcome.test}" for outcome in verdict.faults
    ]
    lines += [f"differs no longer, and is in KNOWN: {name}" for name in verdict.stale]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
