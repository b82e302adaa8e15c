"""Tiny models of several families, with random weights, as Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 320
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Larger than a real model's: a wrong layer shows in the logits.
    "initializer_range": 0.1,
}


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_COMMON, tie_word_embeddings=True))


def _qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_COMMON))


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_COMMON, head_dim=32))


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_COMMON, **experts, head_dim=16, norm_topk_prob=True)
    )


MAKERS: dict[str, Callable[[], Any]] = {
    "llama": _llama,  # the embedding is the output layer too
    "qwen2": _qwen2,  # biases in attention
    "qwen3": _qwen3,  # norms of queries and keys, heads wider than hidden / heads
    "qwen3-moe": _qwen3_moe,  # experts
}


def make(name: str, folder: Path) -> None:
    """Write one of them."""
    import torch

    torch.manual_seed(11)
    model = MAKERS[name]()
    # Biases and norms are zeros and ones when new: a swapped one would not show.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
