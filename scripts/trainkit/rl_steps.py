"""Steps of a run of verl, read from its metrics; and the loss of a rank, if the user asks for
it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = "steps.jsonl"
"""File of verl's metrics in a run's folder. Metrics of earlier attempts are in steps.1.jsonl and so
on."""
LOG = "verl.log"
_RANKS = re.compile(r"ranks are processes \[([\d, ]+)\]")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step, from verl's own metrics."""

    number: int
    reward: float
    """Mean reward over the responses."""
    kl: float
    """KL divergence from the reference, per token."""
    mismatch: float
    """Largest difference of a token's probability between rollout and training."""
    seconds: float
    grad_norm: float
    """Norm of the actor's gradients."""


def read_steps(folder: Path) -> list[Step]:
    """Return the steps of all attempts so far. An incomplete last line is left out."""
    earlier = sorted(folder.glob("steps.*.jsonl"), key=lambda file: int(file.suffixes[0][1:]))
    files = [file for file in (*earlier, folder / STEPS) if file.exists()]
    texts = [file.read_text(encoding="utf-8") for file in files]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    # Entries without a reward are evaluations. A restarted run repeats steps, so the last entry
    # counts.
    entry_of = {e["step"]: e for e in entries if "critic/score/mean" in e["data"]}
    return [_step(entry_of[number]) for number in sorted(entry_of)]


def _step(entry: dict[str, Any]) -> Step:
    data = entry["data"]
    return Step(
        number=entry["step"],
        reward=data["critic/score/mean"],
        kl=data.get("actor/kl_loss", data.get("actor/reward_kl_penalty", 0.0)),
        mismatch=data["training/rollout_probs_diff_max"],
        seconds=data["timing_s/step"],
        grad_norm=data.get("actor/grad_norm", 0.0),
    )


class Loss:
    """Loss of a rank's actor, which the user has asked for, and the time until training goes on."""

    def __init__(self, folder: Path, at: int | None, say: Callable[[str], None]) -> None:
        """``at``: step after which the actor of the last rank is killed; None: no loss. ``say``:
        function that prints a line."""
        self._folder, self._at, self._say = folder, at, say
        self._killed_at: float | None = None
        self._over = at is None

    def look(self) -> None:
        """Kill the actor when its step is done. Later, print when another step is done."""
        if self._over:
            return
        file = self._folder / STEPS
        if self._killed_at is None:
            if any(step.number >= (self._at or 0) for step in read_steps(self._folder)):
                process = ranks(self._folder)[-1]
                self._say(f"  killing the actor of the last rank (process {process})")
                os.kill(process, signal.SIGKILL)
                self._killed_at = time.monotonic()
        # When training begins again, verl renames the file of earlier steps.
        elif file.with_suffix(".1.jsonl").exists() and file.exists() and file.stat().st_size:
            seconds = time.monotonic() - self._killed_at
            self._say(f"  the next step is done {seconds:.1f} s after the loss")
            self._say(f"  ranks are processes {ranks(self._folder)}")
            self._over = True


def ranks(folder: Path) -> list[int]:
    """Return the process ids of the ranks of a run with spares, as they were logged last."""
    log = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    return [int(rank) for rank in _RANKS.findall(log)[-1].split(",")]
