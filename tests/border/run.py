"""Runs the matrix, or some of its cells, and writes its table. Other cells stay as they are.

build/venv/bin/python -m tests.border.run [--interface NAME,...] [--scenario NAME,...]
    [--jobs N] [--markdown docs/results/border.md]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.progress import Progress
from tests.border import interfaces, matrix, scenarios
from tests.layouts.job import JobFailed, start_fork_server
from tests.layouts.table import Table

BEGIN = "<!-- begin: border -->"
INTERFACES = [interface.name for interface in interfaces.SERVED]


def main() -> int:
    """Run the cells; the exit status is 0 if every cell is good."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--interface", type=matrix.names, default=INTERFACES)
    parser.add_argument("--scenario", type=matrix.names, default=list(scenarios.SCENARIOS))
    parser.add_argument("--jobs", type=int, default=2, help="cells at once (default: 2)")
    parser.add_argument("--markdown", type=Path, help="write the rows into this document")
    options = parser.parse_args()
    wanted = [
        cell
        for cell in matrix.cells()
        if cell[0] in options.interface and cell[1] in options.scenario
    ]
    start_fork_server(["tests.border.cell", "tests.layouts.warm"])
    verdicts: dict[tuple[str, str], matrix.Verdict] = {}

    def judge(cell: tuple[str, str]) -> None:
        with tempfile.TemporaryDirectory(prefix="border-") as folder:
            try:
                job = matrix.run_cell(Path(folder) / "cell", *cell)
                verdict = matrix.judge(job, *cell)
            except JobFailed as error:
                verdict = matrix.Verdict(text=f"fails: {error}", is_good=False)
        verdicts[cell] = verdict
        progress.step("+".join(cell))
        if not verdict.is_good:
            print(f"{cell[0]} + {cell[1]}: {verdict.text[-1500:]}", file=sys.stderr)

    with (
        Progress("border", total=len(wanted), unit="cells") as progress,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        list(pool.map(judge, wanted))
    bad = [cell for cell, verdict in verdicts.items() if not verdict.is_good]
    print(f"{len(verdicts) - len(bad)} of {len(verdicts)} cells are good")
    if options.markdown is not None:
        table = Table(begin=BEGIN, head=["", *INTERFACES], keys=list(scenarios.SCENARIOS))
        table.put(options.markdown, matrix.rows(verdicts, table.written(options.markdown)))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
