#!/usr/bin/env python3
"""Breaks jobs under Ray in every way that they must survive, and tells what became of each.

Each job trains a small GPT on two or four ranks of this machine, with spares, a scheduler and a
server. With --device cuda ranks are on GPUs, which they share where there are too few, and the case
that loses a machine is left out. It has survived when its losses, of every step,
before and after the failure, are those of a job without one, to the last bit. Times are in seconds
from the failure.

Exit status: 0 all were survived; 1 one was not; 2 bad usage.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / name) for name in ("bench", "scripts")]

from benchkit.cells import refuse_missing_gpus  # noqa: E402
from megatron_byteps_ray.cluster import cluster  # noqa: E402
from megatron_byteps_ray.phases import ORDER  # noqa: E402
from megatron_byteps_ray.pool import Pool  # noqa: E402
from paritykit.platforms import CUDA, PLATFORMS  # noqa: E402
from raykit.cases import (  # noqa: E402
    CASES,
    Outcome,
    Runner,
    cluster_settings,
    pool_settings,
    problems,
    several_nodes,
)
from raykit.gpus import gpus_to_offer  # noqa: E402

BEGIN = "<!-- made by `make ray-failures MARKDOWN=docs/results/ray.md`; not to be edited by hand -->"
END = "<!-- end -->"
COLUMNS = {
    "noticed": "noticed",
    "ended": "ended",
    "replaced": "replaced",
    "servers": "servers",
    "started": "started",
    "groups": "groups",
    "byteps": "BytePS",
    "loaded": "loaded",
    "step": "first step",
    "total": "in all",
}
assert [*ORDER, "total"] == list(COLUMNS)


def row(title: str, outcome: Outcome, found: Sequence[str]) -> str:
    """One line of the table: of several recoveries the last."""
    spent = outcome.of("recovered")[-1]["phases"].seconds() if outcome.of("recovered") else {}
    times = [f"{spent[name]:.1f}" if name in spent else "-" for name in COLUMNS]
    blame = str(outcome.of("failure")[0]["failure"]) if outcome.of("failure") else "-"
    verdict = "the same" if not found else "**no**: " + "; ".join(found)
    cells = [title, f"`{blame.splitlines()[0]}`", verdict, *times]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def table(rows: Sequence[str]) -> str:
    head = ["failure", "what the driver says", "losses", *COLUMNS.values()]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * 3}{'---:|' * len(COLUMNS)}", *rows]
    where = f"{os.cpu_count()} processors, {platform.system()} {platform.machine()}, no GPU"
    load = os.getloadavg()[0]
    note = f"Measured on {where}; load {load:.0f} from other work at the end."
    return "\n".join([BEGIN, "", note, "", *lines, "", END])


def rows_of(markdown: Path | None) -> dict[str, str]:
    """The rows that a document has already, by their titles: those of ``--case`` replace theirs."""
    if markdown is None:
        return {}
    lines = markdown.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines()
    found = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    return {case.title: found[case.title] for case in CASES.values() if case.title in found}


def put(markdown: Path, text: str) -> None:
    """Put the table in its place in a document."""
    before, begin, rest = markdown.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"error: {markdown} has no place for the table ({BEGIN})")
    markdown.write_text(before + text + after, encoding="utf-8")


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
        # The machines that it would lose have no GPUs.
        options.case = [name for name in options.case if not CASES[name].loses_node]
        if not options.case:
            parser.error("--device cuda leaves out the case that loses a machine: none is left")
    rows, good = rows_of(options.markdown), True
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
                    found = problems(case, outcome, runner.uninterrupted(case))
                    rows[case.title] = row(case.title, outcome, found)
                    good = good and not found
                    print(rows[case.title], flush=True)
                    if options.markdown is not None:
                        order = [c.title for c in CASES.values() if c.title in rows]
                        put(options.markdown, table([rows[title] for title in order]))
            finally:
                pool.close()
    print("all were survived" if good else "NOT all were survived")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
