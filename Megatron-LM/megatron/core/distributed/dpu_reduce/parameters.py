# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""How many parameters a rank holds, counted from the sizes of a GPT or a hybrid of it.

Matrices, biases, norms and the further parameters of Mamba layers are counted, for the stage of a
pipeline that holds the most. Nothing is built.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MAMBA, _ATTENTION, _DENSE, _MOE = "M", "*", "-", "E"


@dataclass(frozen=True, kw_only=True)
class Count:
    """Parameters of one rank."""

    dense: float
    expert: float
    """Of experts, which are reduced over a group of their own where that differs."""
    embedding: float = 0.0
    """Of the dense ones, those of embeddings and output layers."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Of a module, before it is split."""

    split: float = 0.0
    """Over tensor-parallel ranks."""
    whole: float = 0.0
    """On each of them."""
    experts: float = 0.0
    """Over expert-parallel ranks, and their tensor-parallel ones."""

    def __add__(self, other: _Part) -> _Part:
        return _Part(
            split=self.split + other.split,
            whole=self.whole + other.whole,
            experts=self.experts + other.experts,
        )

    def __mul__(self, times: float) -> _Part:
        return _Part(
            split=self.split * times, whole=self.whole * times, experts=self.experts * times
        )


def count(model: Any) -> Count:
    """Count the parameters of a rank.

    Args:
        model: Megatron's arguments, or a TransformerConfig with ``vocab_size`` and
            ``share_embeddings_and_output_weights``.
    """
    tensor, pipeline = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    kinds = _kinds(model)
    layers = {kind: _layer(model, kind) for kind in set(kinds)}
    stages = _split(kinds, pipeline)
    norm, embedding = _norm(model), _Part(split=float(_vocabulary(model) * model.hidden_size))
    positions = _Part()
    if getattr(model, "position_embedding_type", "none") == "learned_absolute":
        length = getattr(model, "max_position_embeddings", None) or model.seq_length
        positions = _Part(whole=float(length * model.hidden_size))
    tied = _is_tied(model)
    ends: list[tuple[_Part, float]] = []
    for index, stage in enumerate(stages):
        total = sum((layers[kind] for kind in stage), _Part())
        first, last = index == 0, index == len(stages) - 1
        tables = int(first)
        if first:
            total += positions
        if last:
            total += _Part(whole=norm)
            tables += not tied or len(stages) > 1
            total += _next_tokens(model, layers, kinds)
        ends.append((total + embedding * tables, embedding.split * tables / tensor))
    expert_tensor = getattr(model, "expert_tensor_parallel_size", None) or tensor
    expert_ranks = getattr(model, "expert_model_parallel_size", 1) * expert_tensor
    counts = [
        Count(
            dense=one.split / tensor + one.whole,
            expert=one.experts / expert_ranks,
            embedding=held,
        )
        for one, held in ends
    ]
    return max(counts, key=lambda one: one.dense + one.expert)


def _kinds(model: Any) -> list[str]:
    """What each layer is. An attention with the MLP after it is two."""
    pattern = getattr(model, "hybrid_layer_pattern", None) or getattr(
        model, "hybrid_override_pattern", None
    )
    if pattern:
        # What follows a slash are heads for further tokens, and `|` separates stages.
        main = pattern.split("/")[0].replace("|", "")
        return [_MAMBA if kind in "GD" else kind for kind in re.sub(r"[^MGD*E-]", "", main)]
    found = []
    for is_moe in _moe_layers(model):
        found += [_ATTENTION, _MOE if is_moe else _DENSE]
    return found


def _moe_layers(model: Any) -> list[bool]:
    experts = _experts(model)
    frequency = getattr(model, "moe_layer_freq", 1)
    if not experts:
        return [False] * model.num_layers
    if isinstance(frequency, int):
        return [index % frequency == 0 for index in range(model.num_layers)]
    return [bool(one) for one in frequency]


def _split(kinds: Sequence[str], stages: int) -> list[Sequence[str]]:
    """As evenly as attention and MLP can be kept together."""
    size = math.ceil(len(kinds) / stages)
    size += size % 2 if kinds and kinds[0] == _ATTENTION else 0
    return [kinds[first : first + size] for first in range(0, stages * size, size)]


def _layer(model: Any, kind: str) -> _Part:
    if kind == _MAMBA:
        return _mamba(model)
    if kind == _ATTENTION:
        return _mla(model) if getattr(model, "multi_latent_attention", False) else _attention(model)
    return _moe(model) if kind == _MOE else _mlp(model, _inner(model))


def _attention(model: Any) -> _Part:
    hidden, heads = model.hidden_size, model.num_attention_heads
    grouped = getattr(model, "group_query_attention", None)
    groups = getattr(model, "num_query_groups", None) or heads
    if grouped is False:
        groups = heads
    channels = getattr(model, "kv_channels", None) or hidden // heads
    heads_out, keys = heads * channels, 2 * groups * channels
    query = hidden * (heads_out + keys) + heads_out * hidden
    split, whole = float(query), _norm(model)
    if model.add_bias_linear or getattr(model, "add_qkv_bias", False):
        split += heads_out + keys
    if model.add_bias_linear:
        whole += hidden
    if getattr(model, "qk_layernorm", False):
        whole += 2 * channels * (2 if model.normalization == "LayerNorm" else 1)
    return _Part(split=split, whole=whole)


def _mla(model: Any) -> _Part:
    hidden, heads = model.hidden_size, model.num_attention_heads
    head, rope = model.qk_head_dim, model.qk_pos_emb_head_dim
    of_norm = 2 if model.normalization == "LayerNorm" else 1
    split = float(heads * model.v_head_dim * hidden)
    whole = _norm(model)
    if model.q_lora_rank is None:
        split += hidden * heads * (head + rope)
    else:
        whole += hidden * model.q_lora_rank
        split += model.q_lora_rank * heads * (head + rope)
        if model.qk_layernorm:
            whole += of_norm * model.q_lora_rank
    whole += hidden * (model.kv_lora_rank + rope)
    split += model.kv_lora_rank * heads * (head + model.v_head_dim)
    if model.qk_layernorm:
        whole += of_norm * model.kv_lora_rank
    if model.add_bias_linear:
        whole += hidden
    return _Part(split=split, whole=whole)


def _mlp(model: Any, inner: int) -> _Part:
    hidden = model.hidden_size
    into = inner * (2 if _is_gated(model) else 1)
    split, whole = float(hidden * into + inner * hidden), _norm(model)
    if model.add_bias_linear:
        split, whole = split + into, whole + hidden
    return _Part(split=split, whole=whole)


def _moe(model: Any) -> _Part:
    hidden, experts = model.hidden_size, _experts(model)
    inner = getattr(model, "moe_ffn_hidden_size", None) or _inner(model)
    latent = getattr(model, "moe_latent_size", None)
    into = inner * (2 if _is_gated(model) else 1)
    wide = latent or hidden
    one = float(wide * into + inner * wide)
    if model.add_bias_linear:
        one += into + wide
    whole = _norm(model) + hidden * experts
    if latent:
        whole += 2 * hidden * latent
    split = 0.0
    shared = getattr(model, "moe_shared_expert_intermediate_size", None)
    if shared:
        split += hidden * shared * (3 if _is_gated(model) else 2)
        if getattr(model, "moe_shared_expert_gate", False):
            whole += hidden
    return _Part(split=split, whole=whole, experts=one * experts)


def _mamba(model: Any) -> _Part:
    hidden = model.hidden_size
    groups, state = model.mamba_num_groups, model.mamba_state_dim
    heads = model.mamba_num_heads or 2 * hidden // model.mamba_head_dim
    inner = heads * model.mamba_head_dim
    convolved = inner + 2 * groups * state
    # Into: two of `inner`, states and steps. A convolution of four with its bias, three values of
    # each head, the norm before the way out.
    split = hidden * (2 * inner + 2 * groups * state + heads) + inner * hidden
    return _Part(split=split + 5.0 * convolved + 3 * heads + inner, whole=_norm(model))


def _next_tokens(model: Any, layers: dict[str, _Part], kinds: Sequence[str]) -> _Part:
    """The heads of multi-token prediction: two norms, a projection of two hidden states into one,
    a layer like the last one, and a norm."""
    heads = getattr(model, "mtp_num_layers", None) or 0
    if not heads:
        return _Part()
    hidden = model.hidden_size
    layer = sum((layers[kind] for kind in kinds[-2:]), _Part())
    return (layer + _Part(whole=3 * _norm(model), split=2.0 * hidden * hidden)) * heads


def _inner(model: Any) -> int:
    """As Megatron derives it where it is not given."""
    return int(model.ffn_hidden_size or 4 * model.hidden_size)


def _norm(model: Any) -> float:
    return float(model.hidden_size * (2 if model.normalization == "LayerNorm" else 1))


def _experts(model: Any) -> int:
    return getattr(model, "num_experts", None) or getattr(model, "num_moe_experts", None) or 0


def _is_gated(model: Any) -> bool:
    return bool(getattr(model, "swiglu", False) or getattr(model, "gated_linear_unit", False))


def _vocabulary(model: Any) -> int:
    for name in ("padded_vocab_size", "vocab_size"):
        if size := getattr(model, name, None):
            return int(size)
    return _USUAL_VOCABULARY


_USUAL_VOCABULARY = 128256
"""Where a tokenizer would have to be read for it."""


def _is_tied(model: Any) -> bool:
    untied = getattr(model, "untie_embeddings_and_output_weights", None)
    if untied is not None:
        return not untied
    return bool(getattr(model, "share_embeddings_and_output_weights", False))
