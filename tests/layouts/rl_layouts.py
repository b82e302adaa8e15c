#!/usr/bin/env python3
"""Trains with verl's own trainer and its vLLM rollout in every layout, through BytePS.

Each row is a run of scripts/rl.py for a few steps. docs/results/integrations.md describes the
checks, and has the table that --markdown writes.

Exit status: 0 success; 1 a failed check, or a failed run, whose log is shown; 2 bad usage.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts import rl
from scripts.rl import Outcome
from scripts.trainkit.job import JobError
from tests.layouts.table import Table, parse, parser_of, run_table

STEPS = 4
ROUNDING = 0.2
"""Limit of the difference between training and rollout, which compute in bf16: up to 0.11 was
measured, and 0.49 with weights from a step earlier."""
BYTEPS = "BytePS flat"
COMMAND = "make rl-layouts MARKDOWN=docs/results/integrations.md"
BEGIN = f"<!-- made by `{COMMAND}`; not to be edited by hand -->"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row of the table."""

    name: str
    training: str
    cut: Sequence[str] = ()
    """Flags of scripts/rl.py for the parallelism."""
    rollout: int = 1
    """Ranks of a vLLM instance."""
    algorithm: str = "grpo"
    mode: str = "sync"

    @property
    def flags(self) -> list[str]:
        """Get the flags of scripts/rl.py."""
        flags = ["--algorithm", self.algorithm, "--mode", self.mode, "--steps", str(STEPS)]
        return [*flags, "--rollout-tensor", str(self.rollout), "--workers", "2", *self.cut]

    @property
    def sums(self) -> bool:
        """Tell whether there are several data-parallel ranks, context-parallel ranks included."""
        return not {"--tensor", "--pipeline"} & set(self.cut)


TP2, PP2 = ("--tensor", "2"), ("--pipeline", "2")
EP2 = ("--expert", "2", "--experts", "4")
LORA, SERVERS, REWARDS = ("--lora", "8"), ("--server-optimizer",), ("--reward-model",)
RUNS = (
    Run(name="dp2-grpo", training="dp2"),
    Run(name="dp2-ppo", training="dp2", algorithm="ppo"),
    Run(name="five-roles-ppo", training="dp2, reward model", cut=REWARDS, algorithm="ppo"),
    Run(name="dp2-to-tp2-grpo", training="dp2", rollout=2),
    Run(name="dp2-to-tp2-grpo-async", training="dp2", rollout=2, mode="colocate_async"),
    Run(name="dp2-grpo-async", training="dp2", mode="colocate_async"),
    Run(name="tp2-grpo", training="tp2", cut=TP2),
    Run(name="tp2-to-tp2-ppo", training="tp2", cut=TP2, rollout=2, algorithm="ppo"),
    Run(name="tp2-sp-grpo", training="tp2 sp", cut=(*TP2, "--sequence-parallel")),
    Run(name="pp2-grpo", training="pp2", cut=PP2),
    Run(name="pp2-vpp2-grpo", training="pp2 vpp2", cut=(*PP2, "--virtual", "2", "--layers", "4")),
    Run(name="cp2-grpo", training="cp2", cut=("--context", "2")),
    Run(name="ep2-grpo", training="ep2", cut=EP2),
    Run(name="ep2-to-tp2-grpo", training="ep2", cut=EP2, rollout=2),
    Run(name="lora-grpo", training="dp2, LoRA", cut=LORA),
    Run(name="lora-merged-grpo", training="dp2, LoRA merged", cut=(*LORA, "--merge")),
    Run(name="servers-grpo", training="dp2, optimizer on servers", cut=SERVERS),
    Run(name="servers-ppo", training="dp2, optimizer on servers", cut=SERVERS, algorithm="ppo"),
)
TABLE = Table(
    begin=BEGIN,
    head=(
        *("training", "rollout", "algorithm", "trainer", "gradients"),
        *("first reward", "last reward", "rollout and training", "s per step"),
    ),
    align="lllllrrrr",
    keys=[(r.training, f"tp{r.rollout}", r.algorithm.upper(), r.mode) for r in RUNS],
    key_of=lambda cells: tuple(cells[:4]),
)


def row(run: Run, outcome: Outcome) -> list[str]:
    cells = [run.training, f"tp{run.rollout}", run.algorithm.upper(), run.mode]
    cells.append(", ".join(sorted(set(outcome.backends))) or "-")
    cells += [f"{outcome.steps[0].reward:.3f}", f"{outcome.steps[-1].reward:.3f}"]
    cells.append(f"{apart(outcome):.3f}")
    return [*cells, f"{sorted(step.seconds for step in outcome.steps)[STEPS // 2]:.1f}"]


def apart(outcome: Outcome) -> float:
    """Get the largest difference of a token's probability between rollout and training."""
    return max(step.mismatch for step in outcome.steps)


def problems(run: Run, outcome: Outcome) -> list[str]:
    wrong = []
    # Asynchronous rollouts use older weights.
    if run.mode == "sync" and apart(outcome) >= ROUNDING:
        wrong.append(f"rollout and training differ by {apart(outcome):.3f}")
    # A single data-parallel rank has nothing to sum.
    backends = set(outcome.backends)
    if backends != {BYTEPS} if run.sums else BYTEPS in backends:
        wrong.append(f"buckets went through {outcome.backends}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    runs, options = parse(parser_of(__doc__, devices=False), RUNS, arguments)
    print("\n".join(TABLE.lines([])), flush=True)
    with tempfile.TemporaryDirectory(prefix="rl-layouts-") as scratch:

        def run(row: Run) -> Outcome:
            out = Path(scratch) / row.name
            return rl.train(rl.parse(["--out", str(out), *row.flags]), backend="BytePS")

        return run_table(
            "rl-layouts",
            runs,
            options,
            TABLE,
            run=run,
            row=row,
            problems=problems,
            title=lambda run: run.name,
            failures=(JobError,),
        )


if __name__ == "__main__":
    sys.exit(main())
