"""Layouts that are trained twice, by ranks as torchrun starts them and by ranks under Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from layouts.gpt.rows import Layout
from layouts.hugging_face.rows import Layout as HuggingFaceLayout

FULL, LORA = "all", "adapters"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A layout, and what is trained in it."""

    layout: str
    ranks: int
    trained: str
    """FULL: a small GPT. LORA: adapters on a small Hugging Face model."""
    model: str
    """The latter's name in ``layouts.hugging_face.models``; empty without one."""
    arguments: tuple[str, ...]
    """Of the training script, but for model and data."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    name: str
    ranks: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    distributed_optimizer: bool = False

    def cells(self) -> list[Cell]:
        sizes: dict[str, Any] = {
            "ranks": self.ranks,
            "tp": self.tp,
            "pp": self.pp,
            "cp": self.cp,
            "ep": self.ep,
        }
        gpt = Layout(
            name=self.name,
            **sizes,
            experts=4 if self.ep > 1 else 0,
            accumulation=2,
            distributed_optimizer=self.distributed_optimizer,
        )
        pretrained = HuggingFaceLayout(
            name=self.name,
            model="qwen3-moe" if self.ep > 1 else "llama",
            **sizes,
            extra=("--use-distributed-optimizer",) if self.distributed_optimizer else (),
        )
        same: dict[str, Any] = {"layout": self.name, "ranks": self.ranks}
        adapters = tuple(pretrained.arguments(lora=True))
        return [
            Cell(**same, trained=FULL, model="", arguments=tuple(gpt.megatron_arguments())),
            Cell(**same, trained=LORA, model=pretrained.model, arguments=adapters),
        ]


_ROWS = (
    _Row(name="dp2", ranks=2),
    _Row(name="dp2-distributed-optimizer", ranks=2, distributed_optimizer=True),
    _Row(name="tp2", ranks=2, tp=2),
    _Row(name="pp2", ranks=2, pp=2),
    _Row(name="tp2-dp2", ranks=4, tp=2),
    _Row(name="pp2-dp2", ranks=4, pp=2),
    _Row(name="pp4-dp2", ranks=8, pp=4),
    _Row(name="tp2-pp2", ranks=4, tp=2, pp=2),
    _Row(name="tp2-pp2-dp2", ranks=8, tp=2, pp=2),
    _Row(name="cp2", ranks=2, cp=2),
    _Row(name="ep2", ranks=2, ep=2),
    _Row(name="dp4-distributed-optimizer", ranks=4, distributed_optimizer=True),
)
CELLS: tuple[Cell, ...] = tuple(cell for row in _ROWS for cell in row.cells())


def by_name(names: Sequence[str]) -> list[Cell]:
    """The cells of the layouts with these names, or all.

    Raises:
        ValueError: no layout has a name.
    """
    known = {row.name for row in _ROWS}
    unknown = [name for name in names if name not in known]
    if unknown:
        known_names = " ".join(row.name for row in _ROWS)
        raise ValueError(f"no layout {' '.join(unknown)}; there are: {known_names}")
    return [cell for cell in CELLS if not names or cell.layout in names]
