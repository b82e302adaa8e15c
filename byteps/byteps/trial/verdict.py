"""Findings of a trial, as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from byteps.trial.reports import Message

ENOUGH = 1.05
"""Least gain at which BytePS is recommended."""
_NAMES = {"nccl": "NCCL", "gloo": "gloo"}


@dataclass(frozen=True, kw_only=True)
class Side:
    """Launches of one kind, which is plain or through servers."""

    name: str
    reports: Sequence[Message]

    @property
    def medians(self) -> list[float]:
        """Median seconds per step of each launch."""
        return [statistics.median(report["times"]) for report in self.reports]

    @property
    def seconds(self) -> float:
        """Median of these medians, in seconds."""
        return statistics.median(self.medians)

    @property
    def losses(self) -> list[float]:
        """Loss of the last step of each launch. Empty if ranks saw no losses."""
        return [report["loss"] for report in self.reports if report["loss"] is not None]


def native_name(report: Message) -> str:
    """Return the name of the backend that a plain launch has used."""
    names = [name for key, name in _NAMES.items() if key in report["backend"]]
    return " and ".join(reversed(names)) or "the plain command"


def fault(report: Message, *, is_plain: bool) -> str:
    """Return why a launch was not of the intended kind. The text is empty if it was."""
    if is_plain and report["joined"]:
        return "the plain launch used BytePS: take it out of the script"
    if not is_plain and not report["joined"]:
        return (
            "the launch through servers did not use BytePS: what was added did not reach the "
            "script. Give a line that passes its last arguments, and the environment, on"
        )
    return ""


def launch_text(report: Message) -> str:
    """Describe a launch in a line."""
    loss = "not seen" if report["loss"] is None else f"{report['loss']:.4f}"
    return f"{1000 * statistics.median(report['times']):.1f} ms per step, loss {loss}"


def table(plain: Side, ours: Side, steps: int) -> str:
    """Return a table of times and losses of the plain launches, and of those through servers."""
    rows = [("", "ms per step", "(min..max of launches)", f"loss after {steps} steps")]
    for side in (plain, ours):
        times, losses = [f"{1000 * seconds:.1f}" for seconds in sorted(side.medians)], side.losses
        loss = "not seen"
        if losses:
            loss = f"{statistics.fmean(losses):.4f} ({min(losses):.4f}..{max(losses):.4f})"
        rows.append((side.name, f"{1000 * side.seconds:.1f}", f"({times[0]}..{times[-1]})", loss))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def answer(plain: Side, ours: Side, added: str, types: str) -> str:
    """Return the recommendation, with the reason.

    Args:
        added: words that turn the plain command into the one through servers.
        types: types in which values travelled, such as "gradients in int8".
    """
    report, native, tried = ours.reports[0], native_name(plain.reports[0]), f"BytePS with {types}"
    gain = plain.seconds / ours.seconds
    if report["ranks"] == 1 or report["hosts"] == 1:
        why = f"all {report['ranks']} ranks are on one host, where nothing crosses a network"
        return f"keep {native}: {why}"
    if any(report["lacks_fsdp"] for report in ours.reports):
        return (
            f"keep {native}, or set BYTEPS_FSDP_DTYPES=int8,int8 and try again: without it FSDP2's "
            "gradients and parameters do not use the servers"
        )
    if not any(report["pushed"] for report in ours.reports):
        return f"keep {native}: on these hosts {tried} leaves all gradients of this job to it, too"
    if gain < ENOUGH:
        return f"keep {native}: {tried} is {gain:.2f} x as fast, which is no gain to rely on"
    if max(ours.medians) >= min(plain.medians):
        return (
            f"keep {native}: {tried} is {gain:.2f} x as fast, but launches of each differ by more; "
            "take more of them (--launches)"
        )
    return f"keep {tried} ({added}): {gain:.2f} x as fast as {native}. {_of_losses(plain, ours)}"


def faster_plain(report: Message) -> str:
    """Return the names of Megatron's own flags that the plain command lacks; empty if it lacks
    none."""
    if not report["missing"]:
        return ""
    return (
        f"The plain line is not Megatron's fastest: try it with {' '.join(report['missing'])} (and "
        "this trial again): these may gain as much without servers"
    )


def _of_losses(plain: Side, ours: Side) -> str:
    if not plain.losses or not ours.losses:
        return (
            "No loss was seen: the script calls backward() on no single number. Compare your own "
            "curves before a long run"
        )
    plain_loss, own_loss = (statistics.fmean(side.losses) for side in (plain, ours))
    per_cent = (
        f"{100 * (own_loss - plain_loss) / abs(plain_loss):+.2f} %"
        if plain_loss
        else f"{own_loss - plain_loss:+.3g}"
    )
    return (
        f"The losses differ by {per_cent}: so few steps do not tell what few bits cost. Compare "
        "your own curves before a long run"
    )
