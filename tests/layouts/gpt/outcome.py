"""What the comparison of a layout came to."""

from __future__ import annotations

from dataclasses import dataclass, field

from .rows import Layout

# Largest relative difference of a step's loss where the order of additions may differ.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "bf16-wire": 2e-2, "fp16-wire": 5e-3}
SENT_AS_TOLERANCE = {"bf16": 2e-2, "int8": 2e-2, "int4": 5e-2}


@dataclass(kw_only=True)
class Errors:
    """How far a backend's sums are from the sums in fp64 of what went into them."""

    relative: dict[str, float] = field(default_factory=dict)
    """By dtype: the largest error of an element over the sum of its parts' magnitudes."""
    inexact: list[str] = field(default_factory=list)
    """Sums of two values that are not the correctly rounded sum."""
    split: list[str] = field(default_factory=list)
    """Sums that are not the same on all members."""

    @property
    def worst(self) -> float:
        return max(self.relative.values(), default=0.0)


@dataclass(kw_only=True)
class Difference:
    """How far two runs are from each other."""

    parameters: float = 0.0
    """The norm of the difference of all final parameters, relative to their norm."""
    norm: float = 0.0
    """Of a step's gradients, relative; the largest."""
    ours: float = 0.0
    """How far our fp32 parameters are from those that updates in fp64 make of the same gradients,
    relative to their norm."""
    theirs: float = 0.0
    """The same of Megatron's own optimizer, with its gradients."""


@dataclass(kw_only=True)
class Report:
    """What the comparison of one layout came to."""

    layout: Layout
    groups: list[int] = field(default_factory=list)
    """Sizes of the groups that sum: the number of values in a sum."""
    buckets: int = 0
    """Different sums of a step, over all ranks."""
    same_bits: bool = False
    """Whether every sum, loss, gradient norm and final parameter is the same to the last bit."""
    ours: Errors = field(default_factory=Errors)
    theirs: Errors = field(default_factory=Errors)
    loss_difference: float = 0.0
    """Largest relative difference of the losses of a step."""
    update: Difference | None = None
    """With the optimizer on the servers: how far its run is from Megatron's own."""
    misses: list[str] = field(default_factory=list)
    """What is not as it must be; empty when all is well."""

    @property
    def bits_must_agree(self) -> bool:
        """Whether both backends round the same sums of at most two values once."""
        small = max(self.groups, default=1) <= 2
        return small and not self.layout.wire and not self.layout.servers

    @property
    def loss_tolerance(self) -> float:
        """Largest relative difference of the losses of a step."""
        if self.bits_must_agree:
            return 0.0
        if self.layout.wire:
            return SENT_AS_TOLERANCE[self.layout.wire]
        return LOSS_TOLERANCE[self.layout.dtype]
