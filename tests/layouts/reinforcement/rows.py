"""The layouts in which verl's workers are tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks of actor, critic and reference are cut, and those of the rollout."""

    name: str
    ranks: int
    tensor: int = 1
    pipeline: int = 1
    samples: int = 1
    """Responses of a data-parallel rank to each of its prompts."""
    resharded: int | None = None
    """Tensor-parallel ranks of Megatron's rollout; None: ``transformers`` with whole models."""

    offload: bool = False
    """Through BytePS with verl's switches for memory; the other way without."""

    @property
    def copies(self) -> int:
        """Data-parallel ranks."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def training(self) -> str:
        return self.name.partition("-to-")[0].replace("-offload", ", offloaded")

    @property
    def rollout(self) -> str:
        if self.resharded is None:
            return "1 whole model" if self.ranks == 1 else f"{self.ranks} whole models"
        return f"{self.ranks // self.resharded} times tp{self.resharded}, resharded"


LAYOUTS = (
    Layout(name="dp1", ranks=1),
    Layout(name="dp2", ranks=2),
    Layout(name="dp2-offload", ranks=2, offload=True),
    Layout(name="tp2", ranks=2, tensor=2),
    Layout(name="pp2", ranks=2, pipeline=2),
    Layout(name="tp2-dp2", ranks=4, tensor=2),
    Layout(name="pp2-dp2", ranks=4, pipeline=2),
    Layout(name="tp2-pp2", ranks=4, tensor=2, pipeline=2, samples=4),
    Layout(name="tp2-pp2-dp2", ranks=8, tensor=2, pipeline=2, samples=4),
    Layout(name="tp2-to-tp1", ranks=2, tensor=2, resharded=1),
    Layout(name="pp2-to-tp2", ranks=2, pipeline=2, resharded=2),
    Layout(name="tp2-dp2-to-tp1", ranks=4, tensor=2, resharded=1),
    Layout(name="pp2-dp2-to-tp2", ranks=4, pipeline=2, resharded=2),
    Layout(name="tp2-pp2-to-tp1", ranks=4, tensor=2, pipeline=2, samples=4, resharded=1),
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
