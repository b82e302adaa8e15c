"""The layouts in which verl's workers are tried."""

from __future__ import annotations

from dataclasses import dataclass

from ..rows import Row


@dataclass(frozen=True, kw_only=True)
class Layout(Row):
    """How the ranks of actor, critic and reference are cut, and those of the rollout."""

    samples: int = 1
    """Responses of a data-parallel rank to each of its prompts."""
    resharded: int | None = None
    """Tensor-parallel ranks of Megatron's rollout; None: ``transformers`` with whole models."""

    offload: bool = False
    """Through BytePS with verl's switches for memory; the other way without."""

    @property
    def training(self) -> str:
        return self.name.partition("-to-")[0].replace("-offload", ", offloaded")

    @property
    def rollout(self) -> str:
        return "whole" if self.resharded is None else f"tp{self.resharded}"


LAYOUTS = (
    Layout(name="dp1", ranks=1),
    Layout(name="dp2", ranks=2),
    Layout(name="dp2-offload", ranks=2, offload=True),
    Layout(name="tp2", ranks=2, tp=2),
    Layout(name="pp2", ranks=2, pp=2),
    Layout(name="tp2-dp2", ranks=4, tp=2),
    Layout(name="pp2-dp2", ranks=4, pp=2),
    Layout(name="tp2-pp2", ranks=4, tp=2, pp=2, samples=4),
    Layout(name="tp2-pp2-dp2", ranks=8, tp=2, pp=2, samples=4),
    Layout(name="tp2-to-tp1", ranks=2, tp=2, resharded=1),
    Layout(name="pp2-to-tp2", ranks=2, pp=2, resharded=2),
    Layout(name="tp2-dp2-to-tp1", ranks=4, tp=2, resharded=1),
    Layout(name="pp2-dp2-to-tp2", ranks=4, pp=2, resharded=2),
    Layout(name="tp2-pp2-to-tp1", ranks=4, tp=2, pp=2, samples=4, resharded=1),
)
