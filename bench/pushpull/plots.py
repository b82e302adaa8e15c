"""Pictures of a run: time against size, part of the links' limit, and backends side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.kit.units import show_size
from bench.pushpull.summary import Row, Run, rows
from bench.pushpull.tables import ratio_pairs

_COLOURS = {
    "byteps": "tab:blue",
    "gloo": "tab:orange",
    "gloo-nodes": "tab:olive",
    "nccl": "tab:green",
    "nccl-nodes": "tab:cyan",
    "sockets": "tab:gray",
}
_DASHES = ("-", "--", ":", "-.")


def _figure(title: str) -> tuple[Any, Any]:
    # Here, because matplotlib takes a second and most runs draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.grid(alpha=0.3)
    return figure, axes


def _lines(run: Run) -> list[tuple[str, str, str, list[Row]]]:
    """(label, colour, dashes, rows by size) of each backend and element type."""
    everything = rows(run)
    dtypes = sorted({row.case.dtype for row in everything})
    lines = []
    for backend in run.plan.backends:
        for dtype in dtypes:
            chosen = [r for r in everything if r.backend == backend and r.case.dtype == dtype]
            chosen.sort(key=lambda row: row.case.size)
            dashes = _DASHES[dtypes.index(dtype) % len(_DASHES)]
            lines.append((f"{backend}, {dtype}", _COLOURS[backend], dashes, chosen))
    return lines


def _size_axis(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [show_size(size) for size in sizes], rotation=30)
    axes.set_xlabel("size")


def draw(run: Run, folder: Path) -> list[Path]:
    """Write the pictures that the run has figures for; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [_draw_times(run, folder / "time.png")]
    if run.plan.topology.link_bits:
        made.append(_draw_of_limit(run, folder / "of-limit.png"))
    if len(run.plan.backends) > 1:
        made.append(_draw_ratios(run, folder / "ratio.png"))
    return made


def parts_of_limit(run: Run) -> dict[str, float]:
    """Of each backend, what the links allow the first one over the backend's median time.

    The largest case counts. The limit is the same for all, so that the parts compare times. Empty
    where links have no limit.
    """
    case = max(run.plan.cases, key=lambda one: one.size)
    found = {row.backend: row for row in rows(run) if row.case == case}
    ours = found.get(run.plan.backends[0])
    if ours is None or ours.of_limit is None:
        return {}
    limit_s = ours.of_limit * ours.p50_s
    return {backend: limit_s / row.p50_s for backend, row in found.items()}


@dataclass(frozen=True)
class Parts:
    """What one experiment says of speed."""

    label: str
    of_limit: Mapping[str, float]
    """Of each backend: what the links allow the first one, over the backend's time."""


def _parts(run: Run) -> Parts:
    case = max(run.plan.cases, key=lambda one: one.size)
    return Parts(f"{run.name}\n{show_size(case.size)} {case.dtype}", parts_of_limit(run))


def draw_overview(runs: Sequence[Run], path: Path) -> None:
    """One picture of many runs: each backend's part of what the links allow.

    Args:
        runs: those without a limit, or launches, have no place in it.
        path: ends in ``.png``, ``.svg`` or another form that matplotlib writes.
    """
    draw_parts([parts for run in runs if run.launches if (parts := _parts(run)).of_limit], path)


def described(experiments: Sequence[Parts]) -> str:
    """All figures of a picture, which it carries as its description."""
    return "; ".join(
        f"{one.label.replace(chr(10), ', ')}: "
        + ", ".join(f"{backend} {part:.2f}" for backend, part in one.of_limit.items())
        for one in experiments
    )


def draw_parts(experiments: Sequence[Parts], path: Path) -> None:
    """One picture of how near to the links' limit each backend comes in each experiment."""
    backends = list(dict.fromkeys(backend for one in experiments for backend in one.of_limit))
    # Here, as in _figure.
    from matplotlib.patches import Patch

    figure, axes = _figure("Push-pull of gradients: fraction of link bandwidth")
    figure.set_size_inches(8.5, 1.4 + 0.7 * max(len(experiments), 1))
    for at, one in enumerate(experiments):
        height = 0.8 / max(len(one.of_limit), 1)
        for number, (backend, part) in enumerate(one.of_limit.items()):
            place = at + (number - (len(one.of_limit) - 1) / 2) * height
            bars = axes.barh(place, part, height * 0.92, color=_COLOURS[backend])
            axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(experiments)), [one.label for one in experiments], fontsize=8)
    axes.set_ylim(max(len(experiments), 1) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("time at the links' limit / median time; longer is faster")
    if backends:
        axes.legend(
            handles=[Patch(color=_COLOURS[name], label=name) for name in backends],
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
        )
    figure.savefig(path, metadata={"Description": described(experiments)})


def _draw_times(run: Run, path: Path) -> Path:
    topology = run.plan.topology
    title = f"Sum over {topology.workers} workers, {topology.servers} servers: median time"
    figure, axes = _figure(title)
    for label, colour, dashes, line in _lines(run):
        sizes = [row.case.size for row in line]
        times = [row.p50_s * 1e3 for row in line]
        axes.plot(sizes, times, dashes, color=colour, marker="o", label=label)
    _size_axis(axes, sorted({case.size for case in run.plan.cases}))
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.legend()
    figure.savefig(path)
    return path


def _draw_of_limit(run: Run, path: Path) -> Path:
    figure, axes = _figure("Fraction of link bandwidth")
    for label, colour, dashes, line in _lines(run):
        points = [(row.case.size, row.of_limit) for row in line if row.of_limit is not None]
        axes.plot(*zip(*points, strict=True), dashes, color=colour, marker="o", label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    _size_axis(axes, sorted({case.size for case in run.plan.cases}))
    axes.set_ylabel("least time / median time")
    axes.legend()
    figure.savefig(path)
    return path


def _draw_ratios(run: Run, path: Path) -> Path:
    pairs = ratio_pairs(run)
    figure, axes = _figure(f"{run.plan.backends[0]}: times as fast, and the launches' spread")
    labels = [f"{show_size(case.size)} {case.dtype}\n{theirs}" for case, _, theirs, _ in pairs]
    values = [found.value for *_, found in pairs]
    below = [found.value - min(found.low, found.value) for *_, found in pairs]
    above = [max(found.high, found.value) - found.value for *_, found in pairs]
    axes.bar(range(len(pairs)), values, yerr=[below, above], capsize=4, color="tab:blue")
    axes.set_xticks(range(len(pairs)), labels, fontsize=8)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("times as fast")
    figure.savefig(path)
    return path
