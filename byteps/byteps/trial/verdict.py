"""The findings of a trial, in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from byteps.trial.reports import Message

ENOUGH = 1.05
"""The least gain for which BytePS is worth keeping."""
_NAMES = {"nccl": "NCCL", "gloo": "gloo"}


@dataclass(frozen=True, kw_only=True)
class Side:
    """The launches of a kind."""

    name: str
    reports: Sequence[Message]

    @property
    def medians(self) -> list[float]:
        """Seconds of a step of each launch."""
        return [statistics.median(report["times"]) for report in self.reports]

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.medians)

    @property
    def losses(self) -> list[float]:
        """The loss of each launch's last step; none where ranks saw none."""
        return [report["loss"] for report in self.reports if report["loss"] is not None]


def native_name(report: Message) -> str:
    """The backend of a plain launch."""
    names = [name for key, name in _NAMES.items() if key in report["backend"]]
    return " and ".join(reversed(names)) or "the plain command"


def fault(report: Message, *, is_plain: bool) -> str:
    """Why a launch was not what it was meant to be; empty: it was."""
    if is_plain and report["joined"]:
        return "the plain launch used BytePS: take it out of the script"
    if not is_plain and not report["joined"]:
        return (
            "the launch through servers did not use BytePS: what was added did not reach the "
            "script. Give a line that passes its last arguments, and the environment, on"
        )
    return ""


def launch_text(report: Message) -> str:
    """A launch in a line."""
    loss = "not seen" if report["loss"] is None else f"{report['loss']:.4f}"
    return f"{1000 * statistics.median(report['times']):.1f} ms per step, loss {loss}"


def table(plain: Side, ours: Side, steps: int) -> str:
    """Times and losses of both."""
    rows = [("", "ms per step", "(min..max of launches)", f"loss after {steps} steps")]
    for side in (plain, ours):
        times, losses = [f"{1000 * one:.1f}" for one in sorted(side.medians)], side.losses
        loss = "not seen"
        if losses:
            loss = f"{statistics.fmean(losses):.4f} ({min(losses):.4f}..{max(losses):.4f})"
        rows.append((side.name, f"{1000 * side.seconds:.1f}", f"({times[0]}..{times[-1]})", loss))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def answer(plain: Side, ours: Side, added: str) -> str:
    """Says what to keep, and why.

    Args:
        added: what makes the plain command the other one.
    """
    report, native = ours.reports[0], native_name(plain.reports[0])
    gain = plain.seconds / ours.seconds
    if report["ranks"] == 1 or report["hosts"] == 1:
        why = f"all {report['ranks']} ranks are on one host, where nothing crosses a network"
        return f"keep {native}: {why}"
    if not any(one["pushed"] for one in ours.reports):
        return f"keep {native}: so does BytePS, for all gradients of this job on these hosts"
    if gain < ENOUGH:
        return f"keep {native}: BytePS is {gain:.2f} x as fast, which is no gain to rely on"
    if max(ours.medians) >= min(plain.medians):
        return (
            f"keep {native}: BytePS is {gain:.2f} x as fast, but launches of each differ by more; "
            "take more of them (--launches)"
        )
    return f"keep BytePS ({added}): {gain:.2f} x as fast as {native}. {_of_losses(plain, ours)}"


def faster_plain(report: Message) -> str:
    """Says which of Megatron's own flags the plain line lacks; empty: none."""
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
    one, other = (statistics.fmean(side.losses) for side in (plain, ours))
    per_cent = f"{100 * (other - one) / abs(one):+.2f} %" if one else f"{other - one:+.3g}"
    return (
        f"The losses differ by {per_cent}: so few steps do not tell what few bits cost. Compare "
        "your own curves before a long run"
    )
