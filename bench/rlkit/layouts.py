"""The layouts in which verl's workers are tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks of actor, critic and reference are cut; the rollout is whole on each."""

    name: str
    ranks: int
    tensor: int = 1
    pipeline: int = 1

    @property
    def copies(self) -> int:
        """Data-parallel ranks."""
        return self.ranks // (self.tensor * self.pipeline)


LAYOUTS = (
    Layout(name="dp2", ranks=2),
    Layout(name="tp2-dp2", ranks=4, tensor=2),
    Layout(name="pp2-dp2", ranks=4, pipeline=2),
)


def by_name(names: Sequence[str]) -> list[Layout]:
    """The layouts of these names, or all.

    Raises:
        ValueError: no such layout.
    """
    known = {layout.name: layout for layout in LAYOUTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no layout {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(LAYOUTS)
