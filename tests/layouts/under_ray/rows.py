"""Layouts that are trained twice: by ranks as under torchrun, and by ranks under Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.layouts.gpt.rows import Layout
from tests.layouts.hugging_face.runs import Layout as HuggingFaceLayout
from tests.layouts.table import Row

FULL, LORA = "all", "adapters"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A layout with the kind of training."""

    name: str
    """Name of the layout."""
    ranks: int
    trained: str
    """FULL: a small GPT. LORA: adapters on a small Hugging Face model."""
    model: str
    """The Hugging Face model's name in ``layouts.hugging_face.models``; empty for a GPT."""
    arguments: tuple[str, ...]
    """Arguments of the training script, without model and data."""


@dataclass(frozen=True, kw_only=True)
class _Row(Row):
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
        same: dict[str, Any] = {"name": self.name, "ranks": self.ranks}
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
