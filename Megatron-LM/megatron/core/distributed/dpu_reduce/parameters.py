# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Computes sizes and layout of a job from its arguments, which Megatron parses, without a GPU.

It counts the parameters of a rank of a GPT or hybrid model, for the pipeline stage with the most
parameters: matrices, biases, norms, and the other parameters of Mamba layers. No model is built.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import os
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from . import translations

_MAMBA, _ATTENTION, _DENSE, _MOE = "M", "*", "-", "E"


@dataclass(frozen=True, kw_only=True)
class Count:
    """Number of parameters of a rank."""

    dense: float
    expert: float
    """Number of parameters of experts. Their gradients may be reduced over another group."""
    embedding: float = 0.0
    """Parameters of embeddings and output layers, included in `dense`."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Number of parameters of a module before it is split over ranks."""

    split: float = 0.0
    """Parameters that are split over tensor-parallel ranks."""
    whole: float = 0.0
    """Parameters that each rank holds as a whole."""
    experts: float = 0.0
    """Parameters that are split over expert-parallel ranks and their tensor-parallel ranks."""

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
    """Count the parameters of the rank with the most parameters.

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
            dense=part.split / tensor + part.whole,
            expert=part.experts / expert_ranks,
            embedding=held,
        )
        for part, held in ends
    ]
    return max(counts, key=lambda count: count.dense + count.expert)


def _kinds(model: Any) -> list[str]:
    """Return the kind of each layer. An attention and the MLP after it count as two layers."""
    pattern = getattr(model, "hybrid_layer_pattern", None) or getattr(
        model, "hybrid_override_pattern", None
    )
    if pattern:
        # Heads for multi-token prediction follow a slash. `|` separates stages.
        main = pattern.split("/")[0].replace("|", "")
        return [_MAMBA if kind in "GD" else kind for kind in re.sub(r"[^MGD*E-]", "", main)]
    kinds = []
    for is_moe in _moe_layers(model):
        kinds += [_ATTENTION, _MOE if is_moe else _DENSE]
    return kinds


def _moe_layers(model: Any) -> list[bool]:
    experts = _experts(model)
    frequency = getattr(model, "moe_layer_freq", 1)
    if not experts:
        return [False] * model.num_layers
    if isinstance(frequency, int):
        return [index % frequency == 0 for index in range(model.num_layers)]
    return [bool(flag) for flag in frequency]


def _split(kinds: Sequence[str], stages: int) -> list[Sequence[str]]:
    """Split layers over stages as evenly as possible. Each attention stays with its MLP."""
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
    per_expert = float(wide * into + inner * wide)
    if model.add_bias_linear:
        per_expert += into + wide
    whole = _norm(model) + hidden * experts
    if latent:
        whole += 2 * hidden * latent
    split = 0.0
    shared = getattr(model, "moe_shared_expert_intermediate_size", None)
    if shared:
        split += hidden * shared * (3 if _is_gated(model) else 2)
        if getattr(model, "moe_shared_expert_gate", False):
            whole += hidden
    return _Part(split=split, whole=whole, experts=per_expert * experts)


def _mamba(model: Any) -> _Part:
    hidden = model.hidden_size
    groups, state = model.mamba_num_groups, model.mamba_state_dim
    heads = model.mamba_num_heads or 2 * hidden // model.mamba_head_dim
    inner = heads * model.mamba_head_dim
    convolved = inner + 2 * groups * state
    # The input projection has two parts of `inner`, and states and steps. Then come a convolution
    # of width 4, three values per head, and the norm before the output projection.
    split = hidden * (2 * inner + 2 * groups * state + heads) + inner * hidden
    return _Part(split=split + 5.0 * convolved + 3 * heads + inner, whole=_norm(model))


def _next_tokens(model: Any, layers: dict[str, _Part], kinds: Sequence[str]) -> _Part:
    """Count the heads of multi-token prediction. Each has two norms, a projection of two hidden
    states into one, a layer like the last one, and a norm."""
    heads = getattr(model, "mtp_num_layers", None) or 0
    if not heads:
        return _Part()
    hidden = model.hidden_size
    layer = sum((layers[kind] for kind in kinds[-2:]), _Part())
    return (layer + _Part(whole=3 * _norm(model), split=2.0 * hidden * hidden)) * heads


def _inner(model: Any) -> int:
    """Return the hidden size of the MLP. If it is not given, derive it as Megatron does."""
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
"""Vocabulary size that is assumed if the real size would have to be read from a tokenizer."""


def _is_tied(model: Any) -> bool:
    untied = getattr(model, "untie_embeddings_and_output_weights", None)
    if untied is not None:
        return not untied
    return bool(getattr(model, "share_embeddings_and_output_weights", False))


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Parallelism of a model, in Megatron's terms."""

    world: int
    """Number of ranks."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """Tensor parallelism of experts; None: that of other layers."""
    experts: int = 0
    """Number of experts per layer; 0: none."""
    pipeline_last: bool = True
    """Whether the ranks of a pipeline stage are neighbours, as without
    ``--use-tp-pp-dp-mapping``."""
    weight_shards: int = 1
    """Number of ranks that each hold a part of a tensor-parallel weight."""
    expert_weight_shards: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError if the ranks cannot be split in this way."""
        for what, size in (
            ("tensor x pipeline x context parallelism", self._dense),
            ("expert, expert tensor and pipeline parallelism", self._sparse),
        ):
            if self.world % size:
                raise ValueError(f"{self.world} ranks cannot be split by {size}, the {what}")

    @property
    def _dense(self) -> int:
        return self.tensor * self.pipeline * self.context * self.weight_shards

    @property
    def _sparse(self) -> int:
        tensor = self.tensor if self.expert_tensor is None else self.expert_tensor
        return tensor * self.pipeline * self.expert * self.expert_weight_shards

    def groups(self, kind: str) -> list[list[int]]:
        """Return the ranks of each data-parallel group (including context parallelism). `kind`:
        "dense" or "expert" gradients."""
        from ... import parallel_state

        is_dense = kind == "dense"
        shards = self.weight_shards if is_dense else self.expert_weight_shards
        order = "tp-cp-ep-dp-pp" if self.pipeline_last else "tp-cp-ep-pp-dp"
        sharded: dict[str, int] = {}
        # Megatron 0.18 has no sharded weights.
        if hasattr(parallel_state, "_inject_gtp_remat_axis"):
            order = parallel_state._inject_gtp_remat_axis(order, after="tp" if is_dense else "ep")
            sharded["gtp_remat"] = shards
        made = parallel_state.RankGenerator(
            tp=self.tensor if is_dense or self.expert_tensor is None else self.expert_tensor,
            ep=1 if is_dense else self.expert,
            dp=self.world // (self._dense if is_dense else self._sparse),
            pp=self.pipeline,
            cp=self.context if is_dense else 1,
            order=order,
            **sharded,
        )
        return [list(ranks) for ranks in made.get_ranks("dp-cp" if is_dense else "dp")]

    @property
    def has_expert_groups(self) -> bool:
        """Return whether experts are reduced over groups of their own."""
        tensor = self.tensor if self.expert_tensor is None else self.expert_tensor
        return self.experts > 0 and (self.expert > 1 or tensor != self.tensor)

    def by_host(self, kind: str, gpus_per_host: int) -> Mapping[tuple[int, ...], float]:
        """Return the host of each member of a group. Each value is the number of groups that have
        the same hosts."""
        return Counter(
            tuple(rank // gpus_per_host for rank in ranks) for ranks in self.groups(kind)
        )


# Parsing and validation of arguments by Megatron itself, on a machine without a GPU.


_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


class NotMegatrons(Exception):
    """Megatron rejects the arguments. The text is Megatron's."""


def parse(
    words: Sequence[str],
    *,
    world: int,
    architecture: int = 9,
    environment: Mapping[str, str] | None = None,
) -> Namespace:
    """Parse, validate and derive the arguments of a training script as Megatron does.

    Questions about the machine are answered as with a GPU and the newest Transformer Engine.
    Arguments that Megatron does not know are assumed to be the script's.

    Args:
        words: the command line without the script.
        world: number of ranks.
        architecture: compute capability of the GPUs: 9 for Hopper, 10 for Blackwell.
        environment: variables that the script sets. If CUDA_DEVICE_MAX_CONNECTIONS is not among
            them, it gets the value that Megatron demands.

    Raises:
        NotMegatrons: Megatron rejects the arguments.
    """
    variables = {"RANK": "0", "LOCAL_RANK": "0", **(environment or {}), "WORLD_SIZE": str(world)}
    tries = [{}] if _CONNECTIONS in variables else [{_CONNECTIONS: "1"}, {_CONNECTIONS: "32"}]
    reasons = []
    for more in tries:
        try:
            return _parse(words, {**variables, **more}, architecture)
        except NotMegatrons as error:
            reasons.append(error)
    # The two attempts may give different errors. An error about CUDA_DEVICE_MAX_CONNECTIONS is the
    # last choice, because the other attempt has passed that check.
    raise next((reason for reason in reasons if _CONNECTIONS not in str(reason)), reasons[0])


def _parse(words: Sequence[str], variables: Mapping[str, str], architecture: int) -> Namespace:
    from megatron.training import arguments

    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables))
        stack.enter_context(mock.patch.object(sys, "argv", ["check", *words]))
        # A Megatron that was patched without the part for CPUs lacks this module.
        with contextlib.suppress(ImportError):
            from megatron.training import cpu_platform

            stack.enter_context(mock.patch.object(cpu_platform, "is_wanted", lambda: False))
        for name, value in _answers(architecture).items():
            if hasattr(arguments, name):
                stack.enter_context(mock.patch.object(arguments, name, value))
        capability = mock.patch("torch.cuda.get_device_capability", lambda *_: (architecture, 0))
        stack.enter_context(capability)
        stack.enter_context(_modules_that_are_asked_for())
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(printed))
        stack.enter_context(_no_warnings())
        try:
            args = arguments.parse_args(ignore_unknown_args=True)
            _pad_vocabulary(args)
            arguments.validate_args(args)
            args.dpu_given = translations.given
        except SystemExit:
            lines = printed.getvalue().strip().splitlines() or ["Megatron's validate_args exited"]
            raise NotMegatrons(lines[-1]) from None
        except Exception as error:
            raise NotMegatrons(_text(error)) from error
    return args


def _answers(architecture: int) -> dict[str, Any]:
    """Return functions that replace functions of Megatron in its check of arguments, by name. The
    replaced ones ask for this machine's GPU and packages."""
    answers: dict[str, Any] = {"get_device_arch_version": lambda: architecture}
    if importlib.util.find_spec("transformer_engine") is None:
        answers["is_te_min_version"] = lambda *_, **__: True
    if importlib.util.find_spec("flashinfer") is None:
        answers["is_flashinfer_min_version"] = lambda *_, **__: True
    return answers


@contextlib.contextmanager
def _modules_that_are_asked_for() -> Iterator[None]:
    """Provide stand-ins for optional packages that a recipe names and that are missing. Megatron
    only imports them."""
    name = "nvidia_resiliency_ext"
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        yield
        return
    names = [
        ".".join([name, *rest[:depth]])
        for rest in (["checkpointing", "local", "ckpt_managers", "local_manager"],)
        for depth in range(len(rest) + 1)
    ]
    with mock.patch.dict(sys.modules, {name: mock.MagicMock(name=name) for name in names}):
        yield


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _pad_vocabulary(args: Namespace) -> None:
    """Set the padded vocabulary size. Megatron would compute it from the tokenizer, which is not
    read here."""
    if getattr(args, "padded_vocab_size", None) is None and getattr(args, "vocab_size", None):
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple


def _text(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text or f"{type(error).__name__} in {_place(error)}"


def _place(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"line {trace.tb_lineno}" if trace is not None else "its checks"
