"""What a run, or two, came to: a table, the losses as JSON and a picture of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .job import Record

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run that ended well."""

    backend: str
    workers: int
    servers: int
    """0 where there are none."""
    record: Record

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.record.steps]

    @property
    def final_loss(self) -> float:
        """Mean of the last ten steps: one batch alone says little."""
        return statistics.fmean(self.losses[-10:])

    @property
    def push_pull_mb_per_s(self) -> float:
        """Median over the steps for which BytePS gave a speed; 0 without."""
        speeds = [s.push_pull_mb_per_s for s in self.record.steps if s.push_pull_mb_per_s > 0]
        return statistics.median(speeds) if speeds else 0.0


def largest_difference(one: Result, other: Result) -> float:
    """Of the two runs' losses at the same step, over all steps."""
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def same_parameters(one: Result, other: Result) -> bool:
    """Whether the final parameters of the two runs are the same to the last bit."""
    return one.record.checksum == other.record.checksum


def table(results: Sequence[Result]) -> str:
    """The summary that ends ``make train``."""
    head = [
        "backend",
        "workers",
        "servers",
        "first loss",
        "last loss",
        "tokens/s",
        "push-pull MB/s",
    ]
    rows = [head]
    for result in results:
        rows.append(
            [
                result.backend,
                str(result.workers),
                str(result.servers) if result.servers else "-",
                f"{result.losses[0]:.4f}",
                f"{result.final_loss:.4f}",
                f"{result.record.tokens_per_s():,.0f}",
                f"{result.push_pull_mb_per_s:,.1f}" if result.push_pull_mb_per_s else "-",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def write_json(results: Sequence[Result], path: Path) -> None:
    """Every loss at full precision, with what each run was."""
    runs = [
        {
            "backend": result.backend,
            "workers": result.workers,
            "servers": result.servers,
            "losses": result.losses,
            "tokens_per_s": result.record.tokens_per_s(),
            "push_pull_mb_per_s": result.push_pull_mb_per_s,
            "parameters_sha256": result.record.checksum,
        }
        for result in results
    ]
    path.write_text(json.dumps({"schema": SCHEMA, "runs": runs}, indent=1) + "\n")


def draw(
    results: Sequence[Result],
    path: Path,
    title: str = "GPT on text, byte by byte: data-parallel gradients summed by BytePS",
    unit: str = "byte",
) -> None:
    """The loss curves as a PNG; losses are per unit."""
    # Here, because matplotlib takes a second and a failed run needs none of it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    styles: list[dict[str, Any]] = [
        {"linewidth": 3.5, "alpha": 0.45},
        {"linewidth": 1.0, "color": "black"},
    ]
    for result, style in zip(results, styles, strict=False):
        steps = [step.iteration for step in result.record.steps]
        label = f"{result.backend}, {result.workers} workers"
        axes.plot(steps, result.losses, label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss (nats per {unit})")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
