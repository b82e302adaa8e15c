"""Adapters of a run: LoRA, DoRA and canonical LoRA, by Megatron-Bridge's classes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from .options import LoraOptions

ADAPTER_FOLDER = "adapter"
"""Subfolder of ``--hf-save`` for the adapters, next to the merged weights."""
_PARTS = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_fc1": ("linear_fc1_up", "linear_fc1_gate"),
}
"""Parts of fused layers. In canonical LoRA each part has an adapter."""
_logger = logging.getLogger(__name__)


class Adapters:
    """Adapters of a run."""

    def __init__(self, options: LoraOptions) -> None:
        from megatron.bridge.peft.canonical_lora import CanonicalLoRA
        from megatron.bridge.peft.dora import DoRA
        from megatron.bridge.peft.lora import LoRA

        self._options = options
        targets = list(options.targets)
        if options.kind == "canonical":
            targets = [part for target in targets for part in _parts(target)]
        kinds = {"lora": LoRA, "dora": DoRA, "canonical": CanonicalLoRA}
        self._peft = kinds[options.kind](
            target_modules=targets,
            dim=options.rank,
            alpha=options.alpha,
            dropout=options.dropout,
        )

    def add(self, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Freeze the models and add adapters, which alone are trained.

        Call this before the models are wrapped for data parallelism. Then frozen parameters have no
        gradient buffer, and are not sent.

        Args:
            models: this rank's model chunks.

        Raises:
            ValueError: a target matches no layer, or this kind does not support the layout.
        """
        kind = self._options.kind
        if kind == "dora" and parallel_state.get_tensor_model_parallel_world_size() > 1:
            # Megatron-Bridge would take the norm of a row from this rank's part of it only.
            raise ValueError("--lora-kind dora needs --tensor-model-parallel-size 1")
        models = self._peft(models, training=True)
        trained = sum(p.numel() for m in models for p in m.parameters() if p.requires_grad)
        if trained == 0:
            raise ValueError(f"--lora-targets {' '.join(self._options.targets)}: no such layer")
        if kind != "lora" and _on_experts(models):
            raise ValueError(
                f"--lora-kind {kind} has no adapters on experts; adapt attention alone: "
                "--lora-targets linear_qkv linear_proj"
            )
        return models

    def save(self, bridge: Any, models: Sequence[torch.nn.Module], base: Path, to: Path) -> None:
        """Write the merged weights, and the adapters as files for ``peft``. All ranks call this,
        and rank 0 writes."""
        spread = parallel_state.get_expert_model_parallel_world_size() > 1 and _on_experts(models)
        if self._options.kind == "dora" or spread:
            # Megatron-Bridge would ignore DoRA's magnitudes, and merge one rank's experts for all.
            with _merged(models):
                bridge.save_hf_weights(list(models), to, show_progress=False)
        else:
            bridge.save_hf_weights(list(models), to, show_progress=False)
        if spread:
            _logger.warning("adapters on experts of several ranks are written only as merged")
            return
        bridge.save_hf_adapter(
            list(models),
            to / ADAPTER_FOLDER,
            self._peft,
            base_model_name_or_path=str(base),
            show_progress=False,
        )
        if self._options.kind == "dora" and torch.distributed.get_rank() == 0:
            _add_magnitudes(to / ADAPTER_FOLDER, to)


def _parts(target: str) -> list[str]:
    """Return the names of a layer's parts in canonical LoRA. A pattern ends with the layer's
    name."""
    start, dot, name = target.rpartition(".")
    return [f"{start}{dot}{part}" for part in _PARTS.get(name, (name,))]


def _on_experts(models: Sequence[torch.nn.Module]) -> bool:
    names = [name for model in models for name, _ in model.named_parameters()]
    return any(".experts." in name and ".adapter." in name for name in names)


@contextmanager
def _merged(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Return a context in which the weights of layers include their adapters, which then add
    nothing. All ranks enter it."""
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper

    before: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, AdapterWrapper):
                weight = module.to_wrap.weight
                merged = _merged_weight(module, on_experts=".experts." in name)
                b = module.adapter.linear_out.weight
                before += [(weight, weight.data), (b, b.data)]
                weight.data, b.data = merged, torch.zeros_like(b)
    try:
        yield
    finally:
        for weight, data in before:
            weight.data = data


def _merged_weight(module: Any, *, on_experts: bool) -> torch.Tensor:
    """Return this rank's part of a layer's weight with its adapter: W + alpha / rank · B A. With
    DoRA each row is scaled to the length that was trained."""
    adapter = module.adapter
    a, b = adapter.linear_in.weight, adapter.linear_out.weight
    if not on_experts:
        # Megatron-Bridge splits A and B over the tensor-parallel ranks.
        if adapter.input_is_parallel:
            b = gather_from_tensor_model_parallel_region(b.T).T
        else:
            a = gather_from_tensor_model_parallel_region(a.T).T
    merged: torch.Tensor = module.to_wrap.weight + adapter.alpha / adapter.dim * (b @ a)
    if hasattr(adapter, "weight_magnitude"):
        scale = adapter.weight_magnitude / torch.linalg.norm(merged, dim=1)
        merged = merged * scale[:, None]
    return merged


def _add_magnitudes(adapter: Path, merged: Path) -> None:
    """Add DoRA's magnitudes, which are the lengths of the merged rows. Megatron-Bridge leaves them
    out."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    weights: dict[str, torch.Tensor] = {}
    for file in merged.glob("*.safetensors"):
        weights |= load_file(file)
    file = adapter / "adapter_model.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    for name in list(tensors):
        start, mark, _ = name.partition(".lora_A.weight")
        if mark:
            base = weights[start.removeprefix("base_model.model.") + ".weight"]
            tensors[f"{start}.lora_magnitude_vector"] = torch.linalg.norm(base, dim=1)
    save_file(tensors, file, metadata)
