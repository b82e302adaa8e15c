"""Models beyond Megatron's entry script, and replacements for optional packages.

T5 and BERT train in Megatron's loop with layers of megatron.core alone. The rest is for layers of
Transformer Engine, and an Adam in place of its FusedAdam.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.enums import ModelType
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import (
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.enums import AttnBackend
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import average_losses_across_data_parallel_group
from pretrain_dpu_gpt import loss_func
from torch.utils.data import Dataset

VOCABULARY = 257
Sample = dict[str, torch.Tensor]


class RandomTokens(Dataset):
    """Samples with random tensors, seeded by their index."""

    def __init__(self, size: int, seed: int, draw: Callable[[torch.Generator], Sample]) -> None:
        self._size, self._seed, self._draw = size, seed, draw

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        return self._draw(generator)


def _tokens(generator: torch.Generator, length: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (length,), generator=generator)


def _mask(generator: torch.Generator, length: int, share: float) -> torch.Tensor:
    """Draw a mask of the positions whose loss counts, at least one."""
    mask = torch.rand(length, generator=generator) < share
    mask[0] = True
    return mask.float()


# --------------------------------------------------------------------------- T5


def _t5(
    pre_process: bool = True, post_process: bool = True, config: Any = None, **_: Any
) -> T5Model:
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    encoder = copy.deepcopy(config)
    encoder.num_layers = args.encoder_num_layers
    return T5Model(
        config=config,
        encoder_config=encoder,
        transformer_encoder_layer_spec=get_t5_encoder_with_local_block_spec(encoder.num_layers),
        transformer_decoder_layer_spec=get_t5_decoder_with_local_block_spec(config.num_layers),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )


def _t5_sample(generator: torch.Generator) -> Sample:
    args = get_args()
    target = _tokens(generator, args.decoder_seq_length + 1)
    return {
        "encoder": _tokens(generator, args.encoder_seq_length),
        "decoder": target[:-1],
        "labels": target[1:],
        "loss_mask": _mask(generator, args.decoder_seq_length, 0.8),
    }


def _t5_step(data: Iterator[Mapping[str, torch.Tensor]], model: torch.nn.Module) -> Any:
    batch = next(data)
    size, source = batch["encoder"].shape
    length = batch["decoder"].size(1)
    sees_all = torch.zeros(size, 1, source, source, dtype=torch.bool)
    later = torch.ones(length, length, dtype=torch.bool).triu(1).expand(size, 1, length, length)
    sees_source = torch.zeros(size, 1, length, source, dtype=torch.bool)
    output = model(
        *(batch["encoder"], batch["decoder"], sees_all, later, sees_source),
        lm_labels=batch["labels"],
    )
    return output, partial(loss_func, batch["loss_mask"])


# --------------------------------------------------------------------------- BERT


def _bert(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    **_: Any,
) -> BertModel:
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    config.attention_backend = AttnBackend.local  # BERT requires an attention backend to be named
    return BertModel(
        config=config,
        num_tokentypes=2,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
    )


def _bert_sample(generator: torch.Generator) -> Sample:
    length = get_args().seq_length
    filled = int(torch.randint(length // 2, length + 1, (), generator=generator))
    padding = (torch.arange(length) < filled).long()
    return {
        "tokens": _tokens(generator, length) * padding,
        "types": (torch.arange(length) >= filled // 2).long() * padding,
        "labels": _tokens(generator, length),
        "loss_mask": _mask(generator, length, 0.15) * padding,
        "padding": padding,
        "swapped": torch.randint(2, (), generator=generator),
    }


def _bert_step(data: Iterator[Mapping[str, torch.Tensor]], model: torch.nn.Module) -> Any:
    batch = next(data)
    output = model(
        batch["tokens"],
        batch["padding"],
        tokentype_ids=batch["types"],
        lm_labels=batch["labels"],
    )
    return output, partial(_bert_loss, batch["loss_mask"], batch["swapped"])


def _bert_loss(mask: torch.Tensor, swapped: torch.Tensor, output: Any) -> Any:
    """Add the losses of the masked words and of the order of the two sentences."""
    of_tokens, logits = output
    words = (of_tokens.float() * mask).sum() / mask.sum()
    order = torch.nn.functional.cross_entropy(logits.float().view(-1, 2), swapped.view(-1))
    averages = average_losses_across_data_parallel_group([words, order])
    return words + order, {"lm loss": averages[0], "order loss": averages[1]}


# --------------------------------------------------------------------------- both

_FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "t5": (_t5, _t5_sample, _t5_step),
    "bert": (_bert, _bert_sample, _bert_step),
}


def main(family: str) -> None:
    """Train a family with the process's arguments, like ``pretrain_dpu_gpt.main`` trains a GPT."""
    model, sample, step = _FAMILIES[family]

    def datasets(sizes: list[int], vp_stage: int | None = None) -> list[RandomTokens]:
        seed = get_args().seed
        return [RandomTokens(size or 1, seed + part, sample) for part, size in enumerate(sizes)]

    # Each rank builds its own dataset.
    datasets.is_distributed = True  # type: ignore[attr-defined] # Megatron looks for it
    args = parse_and_validate_args(
        args_defaults={
            "tokenizer_type": "NullTokenizer",
            "vocab_size": VOCABULARY,
            "make_vocab_size_divisible_by": 1,
        }
    )
    container = pretrain_cfg_container_from_args(args)
    pretrain(container, datasets, ModelType.encoder_or_decoder, step, model)
    dist.barrier()
    dist.destroy_process_group()


# --------------------------------------------------------------------------- Transformer Engine


DOCUMENTS = (0, 24, 40, 64)
"""Start of each document of a packed row, and the end of the last document."""


def fuse_output_layer() -> None:
    """Make Megatron's own output layer add its weight gradient to the bucket.

    Transformer Engine's layers do this themselves. For the output layer, Megatron needs a kernel of
    Apex.
    """

    def add(inputs: torch.Tensor, grads: torch.Tensor, total: torch.Tensor) -> None:
        """Add the product of ``[n, in]`` and ``[n, out]`` to ``[out, in]``."""
        total.add_(grads.t().float() @ inputs.float())

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add
    )
    layers._grad_accum_fusion_available = True


def pack(model: torch.nn.Module) -> None:
    """Make a model treat each row of tokens as several documents, laid end to end."""

    def with_documents(_: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        tokens, position_ids, _ = args
        starts = torch.tensor(DOCUMENTS, dtype=torch.int32, device=tokens.device)
        longest = max(end - begin for begin, end in pairwise(DOCUMENTS))
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        # The documents replace the attention mask.
        return (tokens, position_ids, None), {**kwargs, "packed_seq_params": packed}

    model.register_forward_pre_hook(with_documents, with_kwargs=True)


class PrecisionAwareAdam(torch.optim.Optimizer):
    """AdamW with the arguments that Megatron passes."""

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weight_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert master_weights and use_decoupled_grad and adam_w_mode and not capturable
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, defaults)
        self._dtypes = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }

    def initialize_state(self, parameter: torch.Tensor, *_: Any) -> None:
        """Create the state, as before the first step."""
        state = self.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=self._dtypes[name])
        state["master_param"] = parameter.detach().to(self._dtypes["master_param"], copy=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make an update; parameters without a gradient stay unchanged."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                gradient = getattr(parameter, "decoupled_grad", None)
                if gradient is not None:
                    self._update(parameter, gradient.float(), group)

    def _update(self, parameter: Any, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if not self.state[parameter]:
            self.initialize_state(parameter)
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        mean = state["exp_avg"].float().lerp(gradient, 1 - beta1)
        square = state["exp_avg_sq"].float().lerp(gradient.square(), 1 - beta2)
        master = state["master_param"].float() * (1 - group["lr"] * group["weight_decay"])
        root = (square / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
        master -= group["lr"] * mean / (1 - beta1 ** group["step"]) / root
        for name, value in (("exp_avg", mean), ("exp_avg_sq", square), ("master_param", master)):
            state[name].copy_(value)
        parameter.copy_(state["master_param"])


def allow_precision_aware_optimizer() -> None:
    """Make Megatron, already imported without Transformer Engine, find this Adam in its place."""
    package = ModuleType("transformer_engine.pytorch.optimizers")
    package.FusedAdam = PrecisionAwareAdam  # type: ignore[attr-defined] # the package has it
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules[name] = ModuleType(name)
    sys.modules[package.__name__] = package
    megatron_optimizer.Adam = PrecisionAwareAdam
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
