#!/usr/bin/env python3
"""Trains verl's actor and critic in every layout, by GRPO and by PPO.

Each cell trains a few steps on this machine's CPU through BytePS and through all-reduce, and hands
the weights to the rollout after each. docs/rl.md says what must come out, and holds the table that
--markdown writes.

Exit status: 0 all is as it must be; 1 a miss, or a rank failed, whose log is shown; 2 bad usage.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "Megatron-LM"
FOLDERS = ("bench", "scripts", "integrations/hf", "integrations/rl")
sys.path[:0] = [str(TREE), *(str(ROOT / name) for name in FOLDERS)]

from megatron_byteps_rl.cpu_environment import ENVIRONMENT  # noqa: E402

# Before verl is imported, here or in the fork server.
os.environ.update(ENVIRONMENT | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})

from benchkit.cells import parse, put_cells  # noqa: E402
from paritykit.forked import JobFailed, start_fork_server  # noqa: E402
from progress import Progress  # noqa: E402
from rlkit.layouts import Layout, by_name  # noqa: E402
from rlkit.runs import PROGRAMS, Outcome, compare  # noqa: E402

ALGORITHMS = ("grpo", "ppo")
BEGIN = "<!-- made by `make rl-layouts MARKDOWN=docs/rl.md`; not to be edited by hand -->"
HEAD = [
    "| layout of training | layout of the rollout | algorithm | samples a prompt | actor | critic "
    "| reward | sums a step | rollout and training | KiB sent in a reshard |",
    "|---|---|---|---:|---|---|---:|---:|---:|---:|",
]


def row(layout: Layout, algorithm: str, outcome: Outcome) -> str:
    """A line of the table."""
    same = {True: "the same bits", False: "**different**", None: "none"}
    roles = [same[outcome.equal.get(role)] for role in ("actor", "critic")]
    reward = "rule" if outcome.rewards_apart is None else f"{outcome.rewards_apart:.3f}"
    sums = f"{sum(outcome.sums.values())}"
    sent = "" if outcome.sent_bytes is None else f"{outcome.sent_bytes / 1024:,.0f}"
    cells = [layout.training, layout.rollout, algorithm.upper(), f"{layout.samples}", *roles]
    return f"| {' | '.join([*cells, reward, sums, f'{outcome.apart:.3f}', sent])} |"


def put(markdown: Path, lines: Sequence[str]) -> None:
    """Write these lines of the table into the document."""
    put_cells(
        markdown,
        lines,
        begin=BEGIN,
        head=HEAD,
        known=[
            (layout.training, layout.rollout, a.upper())
            for layout in by_name([])
            for a in ALGORITHMS
        ],
        key_of=lambda columns: tuple(columns[:3]),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    layouts, markdown = parse(__doc__, by_name, arguments)
    cells = [(layout, algorithm) for layout in layouts for algorithm in ALGORITHMS]
    lines, good = [], True
    with (
        tempfile.TemporaryDirectory(prefix="rl-layouts-") as folder,
        Progress("rl-layouts", total=len(cells), unit="cells") as bar,
    ):
        bar.update("the base model is taught; torch, Megatron and verl are imported")
        start_fork_server([PROGRAMS])
        from megatron_byteps_rl import task

        model = task.make_model(Path(folder) / "base")
        from rlkit import rewards

        reward = rewards.write(model, Path(folder) / "reward")
        print("\n".join(HEAD), flush=True)
        for number, (layout, algorithm) in enumerate(cells):
            bar.update(f"{layout.name} {algorithm}", done=number)
            try:
                outcome = compare(Path(folder) / str(number), layout, algorithm, model, reward)
            except (JobFailed, AssertionError) as error:
                print(f"{layout.name} {algorithm}: {error}", file=sys.stderr)
                return 1
            good = good and outcome.good
            lines.append(row(layout, algorithm, outcome))
            bar.say(lines[-1], stream=sys.stdout)
    if markdown is not None:
        put(markdown, lines)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
