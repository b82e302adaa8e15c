"""What a reinforcement-learning run, or two, came to: steps, samples, a table and a picture."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EDGE = 3
"""Steps at each end of a run whose mean reward counts."""
_SHOWN = 12
_WIDTH = 60
_CHOSEN = re.compile(r"(BytePS[ \w]*?|reduce-scatter|all-reduce) {2,}.* yes\b(?!: a single rank)")
"""A line of the table that begins with ``dpu_reduce:``, but where there is nothing to reduce."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step, of verl's own metrics."""

    number: int
    reward: float
    """Mean over the responses."""
    kl: float
    """From the reference, per token."""
    mismatch: float
    """Largest difference of a token's probability between rollout and training."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt, and how the model went on."""

    prompt: str
    response: str
    wanted: str
    right: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run that ended well."""

    backend: str
    steps: list[Step]
    before: list[Sample]
    """Of the first step."""
    after: list[Sample]
    """Of the last."""
    backends: list[str]
    """Of each bucket of gradients, as Megatron's ranks logged it when they began."""

    @property
    def first_reward(self) -> float:
        return statistics.fmean(step.reward for step in self.steps[:EDGE])

    @property
    def last_reward(self) -> float:
        return statistics.fmean(step.reward for step in self.steps[-EDGE:])


def read_steps(folder: Path) -> list[Step]:
    """The steps so far, of all attempts; a last line that is not whole yet is left out."""
    earlier = sorted(folder.glob("steps.*.jsonl"), key=lambda file: int(file.suffixes[0][1:]))
    files = [file for file in (*earlier, folder / "steps.jsonl") if file.exists()]
    texts = [file.read_text(encoding="utf-8") for file in files]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    # What has no reward is an evaluation alone. A run that began again repeats steps.
    found = {e["step"]: e for e in entries if "critic/score/mean" in e["data"]}
    return [_step(found[number]) for number in sorted(found)]


def _step(entry: dict[str, Any]) -> Step:
    data = entry["data"]
    return Step(
        number=entry["step"],
        reward=data["critic/score/mean"],
        kl=data.get("actor/kl_loss", data.get("actor/reward_kl_penalty", 0.0)),
        mismatch=data["training/rollout_probs_diff_max"],
        seconds=data["timing_s/step"],
    )


def _samples(file: Path) -> list[Sample]:
    entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        Sample(prompt=e["input"], response=e["output"], wanted=e["gts"], right=e["score"] == 1)
        for e in entries
    ]


def read(folder: Path, backend: str) -> Outcome:
    """What a whole run wrote."""
    numbers = sorted(int(file.stem) for file in (folder / "samples").glob("*.jsonl"))
    before, after = (_samples(folder / "samples" / f"{n}.jsonl") for n in (numbers[0], numbers[-1]))
    log = (folder / "verl.log").read_text(encoding="utf-8", errors="replace")
    return Outcome(
        backend=backend,
        steps=read_steps(folder),
        before=before,
        after=after,
        backends=_CHOSEN.findall(log),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _end(text: str) -> str:
    """The last words, in one line."""
    return " ".join(text.split())[-_WIDTH:]


def samples(outcome: Outcome) -> str:
    """Some prompts with a response of the first and of the last step, and how many were right."""
    before = {sample.prompt: sample for sample in outcome.before}
    after = {sample.prompt: sample for sample in outcome.after}
    both = sorted(before.keys() & after.keys())
    rows = [["prompt", "right", "before", "after"]]
    rows += [
        [_end(p), before[p].wanted, _end(before[p].response), _end(after[p].response)]
        for p in both[:_SHOWN]
    ]
    right = [
        f"{sum(s.right for s in some)} of {len(some)}" for some in (outcome.before, outcome.after)
    ]
    return _aligned([*rows, ["all", "", *right]])


def table(outcomes: Sequence[Outcome]) -> str:
    """The summary that ends ``make rl``."""
    rows = [
        ["backend", "first reward", "last reward", "last KL", "mismatch", "s/step"],
    ]
    for outcome in outcomes:
        rows.append(
            [
                outcome.backend,
                f"{outcome.first_reward:.3f}",
                f"{outcome.last_reward:.3f}",
                f"{outcome.steps[-1].kl:.4f}",
                f"{max(s.mismatch for s in outcome.steps):.4f}",
                f"{statistics.median(s.seconds for s in outcome.steps):.2f}",
            ]
        )
    return _aligned(rows)


def draw(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Reward and KL as a PNG."""
    # Here, because matplotlib takes a second and a failed run needs none of it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    styles: list[dict[str, Any]] = [
        {"linewidth": 3.5, "alpha": 0.45},
        {"linewidth": 1.0, "color": "black"},
    ]
    for outcome, style in zip(outcomes, styles, strict=False):
        numbers = [step.number for step in outcome.steps]
        upper.plot(numbers, [s.reward for s in outcome.steps], label=outcome.backend, **style)
        lower.plot(numbers, [s.kl for s in outcome.steps], label=outcome.backend, **style)
    upper.set_title(title)
    upper.set_ylabel("reward")
    upper.set_ylim(0, 1.02)
    lower.set_ylabel("KL from the reference")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
