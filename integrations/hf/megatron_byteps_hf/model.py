"""Hugging Face model for Megatron's training loop: its arguments, weights, adapters and files."""

from __future__ import annotations

import dataclasses
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .adapters import Adapters
from .bridge import auto_bridge
from .options import Options, add_flags

# Settings of a model family that Megatron's local layers support. Megatron's arguments have the
# same names.
_ARCHITECTURE = frozenset(
    """
    add_bias_linear add_qkv_bias attention_dropout attention_output_gate ffn_hidden_size
    hidden_dropout hidden_size init_method_std kv_channels layernorm_epsilon
    layernorm_zero_centered_gamma moe_aux_loss_coeff moe_ffn_hidden_size moe_layer_freq
    moe_router_enable_expert_bias moe_router_group_topk moe_router_load_balancing_type
    moe_router_num_groups moe_router_pre_softmax moe_router_score_function moe_router_topk
    moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_intermediate_size
    normalization num_attention_heads num_layers qk_layernorm softmax_scale
    """.split()  # noqa: SIM905
)
# Settings whose arguments have another name; see _arguments().
_TRANSLATED = frozenset(
    {"activation_func", "gated_linear_unit", "num_moe_experts", "num_query_groups"}
)
# Settings of the computation. They are Megatron's arguments, and not the model's.
_HOW = frozenset(
    """
    apply_rope_fusion attention_backend attention_softmax_in_fp32 autocast_dtype bf16
    bias_activation_fusion bias_dropout_fusion cp_comm_type cross_entropy_fusion_impl
    cross_entropy_loss_fusion deallocate_pipeline_outputs fp16 gradient_accumulation_fusion
    masked_softmax_fusion moe_grouped_gemm moe_permute_fusion moe_router_dtype
    moe_token_dispatcher_type params_dtype persist_layer_norm pipeline_dtype transformer_impl
    use_te_rng_tracker variable_seq_lengths
    """.split()  # noqa: SIM905
)

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pth")


class HuggingFaceModel:
    """Model of a run. Every rank creates it.

    Raises:
        ValueError: there is no bridge for this kind of model, or it needs features that Megatron's
            own layers lack.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._bridge = auto_bridge().from_hf_pretrained(
            str(options.model), dtype=torch.float32, local_files_only=True
        )
        try:
            self._provider = self._bridge.to_megatron_provider(load_weights=False)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"--hf-model {options.model}: {error}") from error
        self._arguments = self._arguments_of_model()
        self._adapters = Adapters(options.lora) if options.lora else None
        self._models: list[torch.nn.Module] = []

    # ------------------------------------------------------------------ before training

    def add_flags(self, parser: ArgumentParser) -> None:
        """Add this package's flags, and set the defaults of Megatron's arguments from the model."""
        add_flags(parser)
        parser.set_defaults(**self._arguments)

    def check(self, args: Namespace) -> None:
        """Refuse arguments that contradict the model.

        Raises:
            ValueError: the text names the argument.
        """
        for name, value in self._arguments.items():
            given = getattr(args, name, value)
            if given != value and name not in ("vocab_size", "padded_vocab_size"):
                flag = "--" + name.replace("_", "-")
                raise ValueError(
                    f"{flag} {given} contradicts --hf-model {self._options.model}, which has "
                    f"{value}: leave it out"
                )
        if args.seq_length > args.max_position_embeddings:
            raise ValueError(
                f"--seq-length {args.seq_length} is more than the model's "
                f"{args.max_position_embeddings} positions"
            )

    def attach(self, config: Any) -> None:
        """Make Megatron's model of this configuration load the weights, and add the adapters.

        Args:
            config: a ``GPTModelConfig``.
        """
        if self._provider.rope_scaling:
            config.rope_scaling_factor = self._provider.rope_scaling_factor
        # Megatron-Bridge reads this setting from `transformer`.
        config.transformer.share_embeddings_and_output_weights = (
            config.share_embeddings_and_output_weights
        )
        config.pre_wrap_hooks.append(self._load)
        if self._adapters is not None:
            config.pre_wrap_hooks.append(self._adapters.add)

    def _load(self, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Read the weights tensor by tensor, so that a rank never holds more than its part and one
        tensor."""
        with torch.no_grad():
            self._bridge.load_hf_weights(models)
        self._models = models
        return models

    # ------------------------------------------------------------------ after training

    def save(self) -> None:
        """Write the trained model to the folder of ``--hf-save``, if the flag is set; see
        write()."""
        if self._options.save is not None:
            self.write(self._options.save)

    def write(self, folder: Path) -> None:
        """Write the model's files with adapters merged into the weights. Also write the adapters'
        files.

        All ranks call this, and rank 0 writes.
        """
        if torch.distributed.get_rank() == 0:
            _copy_all_but_weights(self._options.model, folder)
        with torch.no_grad():
            if self._adapters is None:
                self._bridge.save_hf_weights(self._models, folder, show_progress=False)
            else:
                self._adapters.save(self._bridge, self._models, self._options.model, folder)

    # ------------------------------------------------------------------ arguments

    def _arguments_of_model(self) -> dict[str, Any]:
        """Return the model's settings, by the names of Megatron's arguments.

        Raises:
            ValueError: a setting is not supported.
        """
        provider = self._provider
        if provider.position_embedding_type != "rope":
            raise self._unsupported("position_embedding_type", provider.position_embedding_type)
        self._check_fields()
        arguments = {name: getattr(provider, name) for name in _ARCHITECTURE}
        arguments = {name: value for name, value in arguments.items() if value is not None}
        if provider.activation_func is torch.nn.functional.silu and provider.gated_linear_unit:
            arguments["swiglu"] = True
        elif provider.activation_func is not torch.nn.functional.gelu or provider.gated_linear_unit:
            raise self._unsupported("activation_func", provider.activation_func.__name__)
        groups = provider.num_query_groups
        if groups is not None and groups != provider.num_attention_heads:
            arguments |= {"group_query_attention": True, "num_query_groups": groups}
        if provider.num_moe_experts:
            arguments["num_experts"] = provider.num_moe_experts
        if provider.seq_len_interpolation_factor is not None:
            factor = provider.seq_len_interpolation_factor
            arguments["rotary_seq_len_interpolation_factor"] = factor
        return arguments | {
            "position_embedding_type": "rope",
            "rotary_base": provider.rotary_base,
            "rotary_percent": provider.rotary_percent,
            "use_rope_scaling": provider.rope_scaling,
            "untie_embeddings_and_output_weights": not provider.share_embeddings_and_output_weights,
            "max_position_embeddings": provider.seq_length,
            # the data are already tokens; see scripts/prepare_data.py
            "tokenizer_type": "NullTokenizer",
            "vocab_size": provider.vocab_size,
            "make_vocab_size_divisible_by": 1,
            "null_tokenizer_eod_id": self._end_of_document(),
        }

    def _check_fields(self) -> None:
        """Refuse a model that has settings which are not passed to Megatron.

        Raises:
            ValueError: the text names the setting.
        """
        from megatron.core.transformer.transformer_config import TransformerConfig

        for field in dataclasses.fields(TransformerConfig):
            if field.name in _ARCHITECTURE | _TRANSLATED | _HOW:
                continue
            value = getattr(self._provider, field.name)
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            else:
                default = field.default
            if value != default and value:
                raise self._unsupported(field.name, value)

    def _end_of_document(self) -> int:
        """Return the model's end-of-text token. If it has none, return its last token."""
        end = self._bridge.hf_pretrained.config.eos_token_id
        end = end[0] if isinstance(end, Sequence) else end
        return self._provider.vocab_size - 1 if end is None else end

    def _unsupported(self, name: str, value: object) -> ValueError:
        family = type(self._provider).__name__
        return ValueError(
            f"--hf-model {self._options.model}: it needs {name}={value}, which is not supported "
            f"here ({family} of Megatron-Bridge)"
        )


def _copy_all_but_weights(model: Path, folder: Path) -> None:
    """Copy the configuration, the tokenizer, and all other files except weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(model.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, folder / file.name)
