#!/usr/bin/env python3
"""Breaks jobs under Ray in every way that they must survive, and reports each result.

Each job trains a small GPT on two or four ranks of this machine, with spares, a scheduler and a
server. With --device cuda ranks are on GPUs, shared if there are too few, and the case that loses a
machine is left out. A job has survived if its losses in every step, before and after the failure,
equal those of a job without failure, bit for bit. Times are in seconds from the failure.

Exit status: 0 all jobs survived; 1 a job did not; 2 bad usage.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.ray_failures.cases import (
    CASES,
    Outcome,
    Runner,
    cluster_settings,
    pool_settings,
    problems,
    several_nodes,
)
from megatron_byteps_ray.cluster import Pool, cluster
from megatron_byteps_ray.generation import ORDER
from tests.layouts.job import CUDA, PLATFORMS, gpus_to_offer
from tests.layouts.table import Table, line, refuse_missing_gpus

COLUMNS = {"noticed": "noticed", "step": "first step", "total": "in all"}
"""Phases of a recovery that the table shows. The driver prints all of them."""
assert set(COLUMNS) <= {*ORDER, "total"}


MADE_BY = "`make ray-failures MARKDOWN=docs/results/integrations.md`; not to be edited by hand"
TABLE = Table(
    begin=f"<!-- made by {MADE_BY} -->",
    head=("failure", "survived", *COLUMNS.values()),
    align="ll" + "r" * len(COLUMNS),
    keys=[case.title for case in CASES.values()],
)


def row(title: str, outcome: Outcome, faults: Sequence[str]) -> list[str]:
    """Return a row of the table. Of several recoveries, the last counts."""
    spent = outcome.of("recovered")[-1]["phases"].seconds() if outcome.of("recovered") else {}
    times = [f"{spent[name]:.1f}" if name in spent else "-" for name in COLUMNS]
    survived = f"**no**: {'; '.join(faults)}" if faults else "yes"
    return [cell.replace("|", "/") for cell in (title, survived, *times)]


def machine() -> str:
    where = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, no GPU"
    return f"{where}; load {os.getloadavg()[0]:.0f} from other work at the end"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="only these")
    parser.add_argument(
        "--device", choices=PLATFORMS, default="cpu", help="of the ranks (default: %(default)s)"
    )
    parser.add_argument("--markdown", type=Path, help="write the table into this document")
    options = parser.parse_args()
    platform = PLATFORMS[options.device]
    if platform is CUDA:
        if options.markdown is not None:
            parser.error("--markdown writes the table of the CPU")
        refuse_missing_gpus(parser, options.device)
        # The machines that are to be lost have no GPUs.
        options.case = [name for name in options.case if not CASES[name].loses_node]
        if not options.case:
            parser.error("--device cuda leaves out the case that loses a machine: none is left")
    good = True
    with tempfile.TemporaryDirectory(prefix="rf-", dir="/tmp") as scratch:
        settings = pool_settings(Path(scratch) / "pool", platform=platform)
        offered = gpus_to_offer(settings)
        with cluster(cluster_settings(settings), temp_dir=f"{scratch}/ray", gpus=offered):
            pool = Pool(settings)
            try:
                pool.open()
                runner = Runner(pool, settings, Path(scratch) / "jobs")
                for name in options.case:
                    case = CASES[name]
                    if case.loses_node:
                        with several_nodes(Path(scratch) / "nodes") as there:
                            outcome = there.run(name, case)
                    else:
                        outcome = runner.run(name, case)
                    faults = problems(case, outcome, runner.uninterrupted(case))
                    cells = row(case.title, outcome, faults)
                    good = good and not faults
                    print(line(cells), flush=True)
                    if options.markdown is not None:
                        TABLE.put(options.markdown, [cells], machine())
            finally:
                pool.close()
    print("all were survived" if good else "NOT all were survived")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
