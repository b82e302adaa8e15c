"""Tables and curves of what replicas learned."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.kit import gpt

Run = dict[str, Any]
"""Of one seed: ``losses``, ``ends_s`` and ``pushed_bytes`` of every step, ``every``, ``after``."""
Runs = Mapping[str, Sequence[Run]]
"""By name, a run for each seed, in the same order; the first name is what others are compared
with."""

LAST = 50
"""Steps whose losses are compared."""
HEAD = (
    *("trained by", f"loss, last {LAST} steps", "over the first", "after exchanges"),
    *("kB per step", "s per step", "over the first"),
)


def loss(run: Run) -> float:
    return statistics.fmean(run["losses"][-LAST:])


def per_step(run: Run, what: str) -> float:
    """How much is added to something in a step, in the mean: over as many whole exchanges as there
    are in the last two thirds of the run, or over all of these steps."""
    values = run[what]
    steps = len(values) - 1 - len(values) // 3
    steps = steps // run["every"] * run["every"] or steps if run["every"] else steps
    return (values[-1] - values[-1 - steps]) / max(1, steps)


def step_s(run: Run) -> float:
    return per_step(run, "ends_s")


def over(runs: Runs, name: str, of: Callable[[Run], float]) -> list[float]:
    """How far something is above what it is in the first run, relative; of each seed."""
    first = next(iter(runs.values()))
    return [of(mine) / of(theirs) - 1 for mine, theirs in zip(runs[name], first, strict=True)]


def common_loss(run: Run, first: Run) -> float | None:
    """Of the steps that begin with the model that all replicas have, right after an exchange, in
    the second half: how far the loss is above that of the first run in the same steps, which have
    the same data. None where there are no such steps."""
    every, after = run["every"], run["after"]
    if not every or every == 1:
        return None
    mine, theirs = run["losses"], first["losses"]
    begins = range(after + every, len(mine), every)
    apart = [mine[at] / theirs[at] - 1 for at in begins if at >= len(mine) // 2]
    return statistics.fmean(apart) if apart else None


def rows(runs: Runs) -> list[Sequence[str]]:
    table: list[Sequence[str]] = [HEAD]
    first = next(iter(runs))
    for name, seeds in runs.items():
        apart = ["", ""]
        if name != first:
            slower = statistics.fmean(over(runs, name, step_s))
            apart = [_relative(over(runs, name, loss)), f"{slower:+.2%}"]
        common = [common_loss(*pair) for pair in zip(seeds, runs[first], strict=True)]
        found = [one for one in common if one is not None]
        pushed = statistics.fmean(per_step(run, "pushed_bytes") for run in seeds)
        table.append(
            [
                *(name, f"{_mean(loss, seeds):.4f}", apart[0], _relative(found) if found else ""),
                *(f"{pushed / 1e3:.1f}", f"{_mean(step_s, seeds):.3f}", apart[1]),
            ]
        )
    return table


def _mean(of: Callable[[Run], float], seeds: Sequence[Run]) -> float:
    return statistics.fmean(map(of, seeds))


def _relative(values: Sequence[float]) -> str:
    """The mean, and how far its 95 % interval reaches, of several values."""
    mean, low, _ = gpt.interval(values)
    return f"{mean:+.2%}" + (f" ±{mean - low:.2%}" if len(values) > 1 else "")


def problems(
    runs: Runs, names: Mapping[str, str], at_most: Mapping[str, float], slower: Mapping[str, float]
) -> list[str]:
    """Losses and times above their limits, which are given by the text that ``names`` turns into a
    name of ``runs``."""
    first, found = next(iter(runs)), []
    for what, of, limits in (("loss", loss, at_most), ("time of a step", step_s, slower)):
        for key, limit in limits.items():
            above = statistics.fmean(over(runs, names[key], of))
            if not above <= limit:
                found.append(
                    f"{names[key]}: the {what} is {above:+.2%} over that of {first}, more than "
                    f"{limit:.2%}"
                )
    return found


def draw(runs: Runs, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    means = {name: _mean_losses(seeds) for name, seeds in runs.items()}
    first = next(iter(means.values()))
    smooth = max(10, len(first) // 50)
    for number, (name, losses) in enumerate(means.items()):
        above.plot(gpt.smooth(losses, smooth), label=name, color=f"C{number}", linewidth=1.2)
        apart = [100 * (mine / one - 1) for mine, one in zip(losses, first, strict=True)]
        below.plot(gpt.smooth(apart, smooth), color=f"C{number}", linewidth=1.0)
    above.set_ylabel("loss per byte, mean of replicas")
    below.set_ylabel(f"% over {next(iter(runs))}")
    below.set_xlabel(f"step; each point is the mean of {smooth}")
    above.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _mean_losses(seeds: Sequence[Run]) -> list[float]:
    return [statistics.fmean(step) for step in zip(*(run["losses"] for run in seeds), strict=True)]
