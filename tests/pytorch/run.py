"""Compares the backend of torch.distributed with gloo by PyTorch's own tests of it.

    build/venv/bin/python -m tests.pytorch.run [--tests NAME ...] [--ranks N] [--per-host N]
        [--wire TYPE] [--markdown docs/results/pytorch-tests.md]

Each test that its wheel has runs over gloo and, with BYTEPS_C10D_MIN_BYTES=1, through servers. One
that passes over gloo alone is a fault, or has its reason in KNOWN.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.progress import Progress
from tests.layouts.table import Table

ROOT = Path(__file__).parents[2]
BEGIN = "<!-- begin: pytorch -->"

KNOWN: dict[str, str] = {}
"""Tests that pass over gloo alone, each with its reason."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One test on both backends."""

    test: str
    gloo: str
    byteps: str
    operations: int
    """All-reduces that went through servers, on all ranks."""
    error: str

    @property
    def is_different(self) -> bool:
        """Passes over gloo, and not here."""
        return self.gloo == "passed" != self.byteps


def compare(
    tests: Sequence[str], *, ranks: int = 2, per_host: int = 1, wire: str = ""
) -> list[Compared]:
    """Run these tests, or all for none, on both backends; the two run side by side."""
    options = ["--ranks", str(ranks), "--per-host", str(per_host)]
    if tests:
        options += ["--tests", *tests]
    with Progress("pytorch", unit="tests") as progress, ThreadPoolExecutor() as pool:
        both = [
            pool.submit(_outcomes, backend, options, wire, progress)
            for backend in ("gloo", "byteps")
        ]
        gloo, ours = (one.result() for one in both)
    return [
        Compared(
            test=name,
            gloo=gloo[name]["outcome"],
            byteps=found["outcome"],
            operations=found["operations"],
            error=found["error"],
        )
        for name, found in ours.items()
    ]


def _outcomes(
    backend: str, options: Sequence[str], wire: str, progress: Progress
) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/pytorch/runner.py")]
    command += ["--backend", backend, "--stand-in", *options]
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DMLC_", "BYTEPS_", "TORCHELASTIC_"))
    }
    env = {**kept, **({"BYTEPS_C10D_WIRE_DTYPE": wire} if wire else {})}
    found: dict[str, dict[str, Any]] = {}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            outcome = json.loads(line)
            found[outcome["test"]] = outcome
            progress.step(f"{backend}: {outcome['test']}")
    if process.returncode != 0:
        raise SystemExit(f"error: the tests over {backend} ended with {process.returncode}")
    return found


def main() -> int:
    """Exit status: 0 if no test passes over gloo alone but those of KNOWN."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", nargs="*", default=[])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1)
    parser.add_argument("--wire", default="", help="BYTEPS_C10D_WIRE_DTYPE")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    compared = compare(
        options.tests, ranks=options.ranks, per_host=options.per_host, wire=options.wire
    )
    for one in compared:
        if one.is_different and one.test not in KNOWN:
            print(f"{one.test}: {one.byteps}\n{one.error[-2500:]}\n", file=sys.stderr)
    faults = [one.test for one in compared if one.is_different and one.test not in KNOWN]
    counts = Counter((one.gloo, one.byteps) for one in compared)
    served = sum(one.operations > 0 for one in compared)
    print(f"{len(compared)} tests, {served} of them send to servers; (gloo, BytePS): {counts}")
    print("\n".join(["passing over gloo alone:", *faults]) if faults else "no fault")
    if options.markdown is not None:
        table = Table(begin=BEGIN, head=["test", "reason"], keys=list(KNOWN))
        table.put(options.markdown, [[name, reason] for name, reason in KNOWN.items()])
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
