"""What a reinforcement-learning run, or two, came to: steps, samples, a table and a picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EDGE = 3
"""Steps at each end of a run whose mean reward counts."""
_SHOWN = 12
_PEAK = "memory/peak_bytes/"


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """Weights in flight from training to the rollout's layout."""

    seconds: float
    """Of the slowest rank."""
    sent_bytes: int
    """Of all ranks, to others."""


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
    accuracy: float
    """The part of the responses that the rule calls right: the reward, unless a model gives it."""
    seconds: float
    peaks: dict[str, int]
    """Bytes of the GPU that took the most, by phase, up to this step; empty on CPUs."""
    reshard: Reshard | None = None
    """Of the weights that generated; None where the rollout takes whole tensors."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt, and how the model went on."""

    prompt: str
    response: str
    wanted: str
    right: bool
    """By the rule."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run that ended well."""

    backend: str
    steps: list[Step]
    before: list[Sample]
    after: list[Sample]
    checksums: dict[str, list[str]]
    """Of the parameters, by role: one for each rank."""

    @property
    def first_reward(self) -> float:
        return statistics.fmean(step.reward for step in self.steps[:EDGE])

    @property
    def last_reward(self) -> float:
        return statistics.fmean(step.reward for step in self.steps[-EDGE:])

    @property
    def first_accuracy(self) -> float:
        return statistics.fmean(step.accuracy for step in self.steps[:EDGE])

    @property
    def last_accuracy(self) -> float:
        return statistics.fmean(step.accuracy for step in self.steps[-EDGE:])


def read_steps(folder: Path) -> list[Step]:
    """The steps so far; a last line that is not whole yet is left out."""
    file = folder / "steps.jsonl"
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    # What has no reward is an evaluation alone.
    return [_step(e) for e in entries if "critic/score/mean" in e["data"]]


def _step(entry: dict[str, Any]) -> Step:
    data = entry["data"]
    reshard = None
    if "reshard/seconds" in data:
        reshard = Reshard(
            seconds=data["reshard/seconds"], sent_bytes=int(data["reshard/sent_bytes"])
        )
    return Step(
        number=entry["step"],
        reward=data["critic/score/mean"],
        kl=data.get("actor/kl_loss", data.get("actor/reward_kl_penalty", 0.0)),
        mismatch=data["training/rollout_probs_diff_max"],
        accuracy=data["rule/accuracy"],
        seconds=data["timing_s/step"],
        peaks={
            name.removeprefix(_PEAK): int(value)
            for name, value in data.items()
            if name.startswith(_PEAK)
        },
        reshard=reshard,
    )


def _samples(file: Path) -> list[Sample]:
    entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        Sample(prompt=e["input"], response=e["output"], wanted=e["gts"], right=e["acc"] == 1)
        for e in entries
    ]


def read(folder: Path, backend: str) -> Outcome:
    """What a whole run wrote."""
    numbers = sorted(int(file.stem) for file in (folder / "samples").glob("*.jsonl"))
    before, after = (_samples(folder / "samples" / f"{n}.jsonl") for n in (numbers[0], numbers[-1]))
    end = json.loads((folder / "end.json").read_text(encoding="utf-8"))
    return Outcome(
        backend=backend,
        steps=read_steps(folder),
        before=before,
        after=after,
        checksums=end["parameters_sha256"],
    )


def same(one: Outcome, other: Outcome) -> bool:
    """Whether every reward, and every bit of the parameters at the end, is the same."""
    return one.checksums == other.checksums and [(s.reward, s.kl) for s in one.steps] == [
        (s.reward, s.kl) for s in other.steps
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def samples(outcome: Outcome) -> str:
    """Some prompts with a response from before and after, and how many of all are right."""
    after = {sample.prompt: sample for sample in outcome.after}
    rows = [["prompt", "right", "before", "after"]]
    for sample in outcome.before[:: max(1, len(outcome.before) // _SHOWN)][:_SHOWN]:
        rows.append([sample.prompt, sample.wanted, sample.response, after[sample.prompt].response])
    right = [
        f"{sum(s.right for s in some)} of {len(some)}" for some in (outcome.before, outcome.after)
    ]
    return _aligned([*rows, ["all", "", *right]])


def table(outcomes: Sequence[Outcome]) -> str:
    """The summary that ends ``make rl``."""
    rows = [
        ["backend", "first reward", "last reward", "right", "last KL", "mismatch", "s/step"],
    ]
    for outcome in outcomes:
        rows.append(
            [
                outcome.backend,
                f"{outcome.first_reward:.3f}",
                f"{outcome.last_reward:.3f}",
                f"{outcome.first_accuracy:.3f} -> {outcome.last_accuracy:.3f}",
                f"{outcome.steps[-1].kl:.4f}",
                f"{max(s.mismatch for s in outcome.steps):.4f}",
                f"{statistics.median(s.seconds for s in outcome.steps):.2f}",
            ]
        )
    return _aligned(rows)


def memory(outcomes: Sequence[Outcome]) -> str:
    """The peak memory of each phase as a table; empty where no GPU was used."""
    phases = dict.fromkeys(phase for o in outcomes for phase in o.steps[-1].peaks)
    if not phases:
        return ""
    rows = [["peak MiB of a GPU", *(outcome.backend for outcome in outcomes)]]
    for phase in phases:
        taken = [outcome.steps[-1].peaks.get(phase, 0) / (1 << 20) for outcome in outcomes]
        rows.append([phase, *(f"{value:,.1f}" for value in taken)])
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
        if any(s.reward != s.accuracy for s in outcome.steps):
            right = [s.accuracy for s in outcome.steps]
            upper.plot(numbers, right, label=f"right, {outcome.backend}", **style, linestyle=":")
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
