"""An experiment: a plan, why it is run, and what it must show."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bench.kit.plan import Plan
from bench.pushpull.gates import Gate


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A plan, why it is run, and what it must show."""

    name: str
    why: str
    plan: Plan
    gates: Sequence[Gate]
    processors: int = 1
    """Below so many the cores, not the links, would be what is measured."""

    def of_launches(self, launches: int) -> Experiment:
        """The same with another number of launches."""
        return replace(self, plan=replace(self.plan, launches=launches, retries=launches))


def demand_hardware(experiments: Sequence[Experiment]) -> None:
    """Refuse what this machine cannot measure. Raises ValueError."""
    there = len(os.sched_getaffinity(0))
    for one in experiments:
        if there < one.processors:
            raise ValueError(
                f"{one.name} needs {one.processors} cores, and there are {there}: "
                "run it on a larger machine, or show what was recorded there with --from-json"
            )
        if one.plan.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"{one.name} needs a GPU, and torch finds none: take the same experiments of CPU "
                "tensors (--set fast), or show what was recorded elsewhere with --from-json"
            )
