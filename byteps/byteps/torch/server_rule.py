"""What servers are told of an update: its rule once, and the rates of each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from byteps.torch.pieces import Range

GroupNumbers = tuple[float, float, float, bool]
"""(beta1, beta2, eps, False) of AdamW, (momentum, dampening, 0, nesterov) of SGD."""
Segment = tuple[int, int, bool]
"""End, parameter group, and whether gradients count in the norm: elements from the last end on."""

# What would change the arithmetic, and may only have this value.
_PLAIN = {"amsgrad": False, "maximize": False, "differentiable": False}


class Step(NamedTuple):
    """What servers are asked for. All members of a group ask for the same."""

    number: int
    """1 for the first one."""
    scale: float
    """Factor of the gradients: below 1 where they are clipped."""
    skip: bool
    """Change nothing."""
    rates: list[tuple[float, float]]
    """Learning rate and weight decay of each parameter group."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What servers are told once."""

    is_adamw: bool
    groups: list[GroupNumbers]

    def groups_of(self, param_groups: Sequence[dict[str, Any]]) -> list[GroupNumbers]:
        """The numbers of these parameter groups. Raises ValueError for what servers cannot do."""
        found = []
        for index, group in enumerate(param_groups):
            for option, plain in _PLAIN.items():
                if group.get(option, plain) != plain:
                    raise ValueError(
                        f"servers do not know {option}={group[option]} (parameter group {index})"
                    )
            if self.is_adamw:
                beta1, beta2 = group["betas"]
                found.append((float(beta1), float(beta2), float(group["eps"]), False))
            else:
                momentum, dampening = float(group["momentum"]), float(group["dampening"])
                found.append((momentum, dampening, 0.0, bool(group["nesterov"])))
        return found

    @property
    def slot_names(self) -> list[str]:
        """What servers keep, as a torch optimizer names it: the fp32 parameters, then moments."""
        if self.is_adamw:
            return ["master_param", "exp_avg", "exp_avg_sq"]
        if any(momentum for momentum, *_ in self.groups):
            return ["master_param", "momentum_buffer"]
        return ["master_param"]


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Raises ValueError for an optimizer, or an option, that servers do not know."""
    kind = type(optimizer)
    if kind not in (torch.optim.AdamW, torch.optim.SGD):
        raise ValueError(f"servers update as torch.optim.AdamW and SGD do, not as {kind.__name__}")
    rule = Rule(is_adamw=kind is torch.optim.AdamW, groups=[])
    rule.groups.extend(rule.groups_of(optimizer.param_groups))
    return rule


def add_segment(segments: list[Segment], end: int, group: int, counted: bool = True) -> None:
    """Append elements up to `end`, to the last segment if they are like it."""
    if segments and segments[-1][1:] == (group, counted):
        segments.pop()
    segments.append((end, group, counted))


def cut_segments(segments: Sequence[Segment], cut: Range, length: int) -> list[Segment]:
    """The segments of elements `cut` of a tensor, and of zeros behind them up to `length`, which do
    not count."""
    begin, end = cut
    found: list[Segment] = []
    before = 0
    for last, group, counts in segments:
        if before < end and last > begin and begin < end:
            found.append((min(last, end) - begin, group, counts))
        before = last
    if end - begin < length:
        found.append((length, found[-1][1] if found else segments[0][1], False))
    return found
