"""LoRA adapters on a Megatron model: made, counted and written as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from .options import LoraOptions

ADAPTER_FOLDER = "adapter"
"""In the folder of ``--hf-save``, next to the merged weights."""


class Adapters:
    """The adapters of one run."""

    def __init__(self, options: LoraOptions) -> None:
        from megatron.bridge.peft.lora import LoRA

        self._lora = LoRA(
            target_modules=list(options.targets),
            dim=options.rank,
            alpha=options.alpha,
            dropout=options.dropout,
        )

    def add(self, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Freeze the models and add adapters, which alone are trained.

        Before the models are wrapped for data parallelism: what is frozen then has no gradient
        buffer, and nothing of it is sent.

        Args:
            models: this rank's chunks.

        Raises:
            ValueError: a target that fits no layer, or experts that lie on several ranks.
        """
        models = self._lora(models, training=True)
        trained = sum(p.numel() for m in models for p in m.parameters() if p.requires_grad)
        if trained == 0:
            raise ValueError(f"--lora-targets {' '.join(self._lora.target_modules)}: no such layer")
        if parallel_state.get_expert_model_parallel_world_size() > 1 and _on_experts(models):
            # Megatron-Bridge would write those of one rank's experts for all.
            raise ValueError(
                "--lora on experts needs --expert-model-parallel-size 1; with more, adapt "
                "attention alone: --lora-targets linear_qkv linear_proj"
            )
        return models

    def save(self, bridge: Any, models: Sequence[torch.nn.Module], base: Path, to: Path) -> None:
        """Write them as files that ``peft`` loads. All ranks call this; rank 0 writes."""
        bridge.save_hf_adapter(
            list(models),
            to / ADAPTER_FOLDER,
            self._lora,
            base_model_name_or_path=str(base),
            show_progress=False,
        )


def _on_experts(models: Sequence[torch.nn.Module]) -> bool:
    names = [name for model in models for name, _ in model.named_parameters()]
    return any(".experts." in name and ".adapter." in name for name in names)
