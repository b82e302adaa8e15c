"""What a rank saw of its training: written by the ranks, read by the comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Sum:
    """One gradient bucket of one step on one rank, before and after the ranks summed it."""

    members: tuple[int, ...]
    """The global ranks that summed."""
    local: Any
    """The whole bucket of this rank as it went into the sum: accumulated and scaled."""
    result: Any
    """The sum as this rank got it: the whole bucket, the shard that it owns, or nothing where
    servers keep it."""
    offset: int
    """Where in the bucket the result begins."""
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each parameter, by its name: first element in the bucket, and last plus one."""


@dataclass(kw_only=True)
class Step:
    """One step of the optimizer on one rank."""

    sums: dict[str, Sum] = field(default_factory=dict)
    """By the bucket's place in the model, the same under every backend."""
    loss: float | None = None
    """Average over all ranks; None where the pipeline's last stage is elsewhere."""
    grad_norm: float | None = None
    zeros: int | None = None
    """Gradients that are 0, where they are counted."""

    def gradients(self) -> dict[str, Any]:
        """Of each parameter, as they went into the sums, whatever buckets they were in."""
        return {
            f"{bucket.split('/', 1)[0]}/{name}": total.local[begin:end]
            for bucket, total in self.sums.items()
            for name, (begin, end) in total.places.items()
        }


@dataclass(kw_only=True)
class RankSeen:
    """A whole run on one rank."""

    steps: list[Step]
    parameters: dict[str, Any]
    """At the end."""
    names: list[str]
    """Of the BytePS operations that this rank started, in that order; empty without."""
    byteps_imported: bool
    pushed_bytes: int = 0
    """To servers, as the engine counts them, in the whole run."""
    pulled_bytes: int = 0
    inexact_updates: list[str] | None = None
    """With gradients in few bits and servers that update: where parameters are not the bits that
    they have to be. None: nobody looked."""
    update_error: tuple[float, float] | None = None
    """Of the final fp32 parameters, sums of squares: of how far they are from those that updates in
    fp64 make of the same gradients, and of these."""
