"""Programs of ranks in tests of recipes: steps in a CUDA graph, Muon, models of many sizes,
Megatron-FSDP; and rounding losses of gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    dpu_reduce,
)
from megatron.core.distributed.dpu_reduce import parameters, plan
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training import training

from tests.megatron.rank_programs import Mixed, _on_core, _pushed_bytes, _wrap


class _Graph:
    """Replaces ``FullCudaGraphWrapper``. The first step runs, and the second is recorded. Later
    steps are replays, in which gradients appear without any of Megatron's Python."""

    def __init__(self) -> None:
        self.calls = 0

    @dpu_reduce.outside_graph
    def __call__(self, *, model: Any, forward_only: bool, step: int, tokens: torch.Tensor) -> str:
        self.calls += 1
        tokens.fill_(step + 2.0)
        if self.calls < 3:
            _pass(model, step, tokens)
            return "run"
        for microbatch in range(2):
            loss = model.module(_input(step, microbatch)).square().sum()
            parameters = list(model.module.parameters())
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                parameter.main_grad.add_(gradient)
        return "replayed"


def _input(step: int, microbatch: int) -> torch.Tensor:
    x = torch.arange(16, dtype=torch.float32).view(2, 8)
    return torch.sin(x + 100 * step + 10 * microbatch + dist.get_rank())


def _pass(model: DistributedDataParallel, step: int, tokens: torch.Tensor) -> None:
    """Make two micro-batches like Megatron's schedules."""
    config = model.config
    with (config.no_sync_func or contextlib.nullcontext)():
        model(_input(step, 0)).square().sum().backward()
    model(_input(step, 1)).square().sum().backward()
    config.finalize_model_grads_func([model], tokens, force_all_reduce=False)


def core_whole_steps(folder: Path, config: dict[str, Any], graph: bool) -> dict[str, Any]:
    """Make four steps on :class:`Mixed`, with or without a graph; return the gradients that this
    rank owns."""

    def body() -> dict[str, Any]:
        ddp = _wrap(Mixed(), **config)
        if config.get("overlap_grad_reduce"):
            ddp.config.no_sync_func = ddp.no_sync

        def finalize(model: Any, tokens: torch.Tensor, force_all_reduce: bool) -> None:
            for chunk in model:
                chunk.finish_grad_sync(force_all_reduce=force_all_reduce)
                chunk.scale_gradients(1.0 / tokens)

        ddp.config.finalize_model_grads_func = finalize
        tokens, run, outcomes = torch.ones(1), _Graph(), []
        gradients: list[list[torch.Tensor]] = []
        for step in range(4):
            ddp.zero_grad_buffer()
            if graph:
                outcomes.append(run(model=ddp, forward_only=False, step=step, tokens=tokens))
            else:
                tokens.fill_(step + 2.0)
                _pass(ddp, step, tokens)
            gradients.append([_owned(bucket, config) for bucket in _buckets(ddp)])
            assert ddp.config.finalize_model_grads_func is finalize
        return {"gradients": gradients, "told": outcomes, "pushed": _pushed_bytes()}

    return _on_core(body)


def _buckets(ddp: DistributedDataParallel) -> list[Any]:
    return [
        bucket for buffer in ddp.buffers + ddp.expert_parallel_buffers for bucket in buffer.buckets
    ]


def _owned(bucket: Any, config: dict[str, Any]) -> torch.Tensor:
    """Return the part of a bucket's gradients that this rank's optimizer uses."""
    if not config.get("use_distributed_optimizer"):
        return bucket.grad_data.clone()
    return bucket.grad_data.chunk(dist.get_world_size())[dist.get_rank()].clone()


class _NoAttention(torch.nn.Module):
    """A stand-in for attention, without parameters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def core_counts(folder: Path) -> dict[str, tuple[float, float, int, int]]:
    """Return, for a few models, the dense and expert parameters as counted from sizes, and as
    built."""
    common: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
    plain = {"add_bias_linear": False, "gated_linear_unit": True, "normalization": "RMSNorm"}
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4}
    models: dict[str, dict[str, Any]] = {
        "biases": {"ffn_hidden_size": 96},
        "grouped": {**plain, "num_query_groups": 2, "ffn_hidden_size": 80, "qk_layernorm": True},
        "experts": {**plain, **experts, "moe_layer_freq": [0, 1, 1, 0]},
        "shared": {**plain, **experts, "moe_shared_expert_intermediate_size": 40},
        "latent": {**plain, **latent, "v_head_dim": 8, "multi_latent_attention": True},
    }

    def counted(config: dict[str, Any], tied: bool) -> tuple[float, float, int, int]:
        kind = MLATransformerConfig if config.get("multi_latent_attention") else TransformerConfig
        transformer = kind(**common, **config, use_cpu_initialization=True)
        spec = get_gpt_layer_local_spec(
            num_experts=transformer.num_moe_experts,
            qk_layernorm=transformer.qk_layernorm,
            multi_latent_attention=transformer.multi_latent_attention,
            normalization=transformer.normalization,
        )
        if transformer.multi_latent_attention:  # Megatron's own attention does not support it.
            spec.submodules.self_attention.submodules.core_attention = _NoAttention
        if transformer.num_moe_experts:
            spec = get_gpt_decoder_block_spec(transformer, use_transformer_engine=False)
        model = GPTModel(
            *(transformer, spec),
            vocab_size=64,
            max_sequence_length=16,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
        )
        transformer.vocab_size = 64
        transformer.share_embeddings_and_output_weights = tied
        count = parameters.count(transformer)
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
        return count.dense, count.expert, sum(sizes.values()) - of_experts, of_experts

    def body() -> dict[str, tuple[float, float, int, int]]:
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        return {name: counted(config, name == "biases") for name, config in models.items()}

    return _on_core(body)


THRESHOLD = 100.0
"""Gradient norm above which a step is skipped."""


def core_muon(folder: Path, served: bool) -> dict[str, Any]:
    """Make four steps of Muon without arguments, every second with a norm above the threshold.
    Return whether each was made, the norms, and the parameters. With ``served`` servers update
    biases."""

    def body() -> dict[str, Any]:
        options: dict[str, Any] = {"use_dpu_reduce": True} if served else {}
        if served:
            options |= {"dpu_optimizer": True, "dpu_optimizer_matrices": False}
        module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        ddp = _wrap(module, **options)
        config = OptimizerConfig(
            optimizer="muon",
            lr=0.1,
            clip_grad=1.0,
            muon_fp32_matmul_prec="high",
            grad_norm_skip_threshold=THRESHOLD,
        )
        optimizer = get_megatron_optimizer(config, [ddp])
        made, norms = [], []
        for step in range(4):
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            # The batch has enough rows for gradients of full rank. With fewer, Muon would make
            # rounding errors as large as the other values.
            inputs = torch.sin(torch.arange(128.0).view(16, 8) ** 2 + step + dist.get_rank())
            (ddp(inputs).square().sum() * (1.0 + step % 2 * 9.0)).backward()
            ddp.finish_grad_sync()
            is_made, norm, _ = optimizer.step()
            made.append(is_made)
            norms.append(norm)
        parameters = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
        return {"made": made, "norms": norms, "parameters": parameters}

    return _on_core(body)


STEPS = 3


def hybrid(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's gradients in each step, and the bytes it pushed, for a model with two
    replicas of two ranks each under Megatron-FSDP."""
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    def body() -> dict[str, Any]:
        # 256 parameters each, which need no padding: padding is not initialized.
        layers = (torch.nn.Linear(16, 16, bias=False) for _ in range(3))
        module = torch.nn.Sequential(*layers)
        ddp_config = DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy="optim_grads_params",
            num_distributed_optimizer_instances=2,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            gradient_reduce_div_fusion=False,  # gloo cannot scale and sum in one operation.
            **config,
        )
        transformer = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1)
        with mock.patch("torch.cuda.current_device", lambda: 0):  # Megatron needs a number here.
            model = FullyShardedDataParallel(
                transformer,
                ddp_config,
                module,
                fsdp_unit_modules=[torch.nn.Linear],
                device=torch.device("cpu"),
            )
        steps: list[list[torch.Tensor]] = []
        for step in range(STEPS):
            model.zero_grad_buffer()
            inputs = torch.sin(torch.arange(64.0).view(4, 16) ** 2 + step + dist.get_rank())
            with model.no_sync():  # Replicas reduce after the last micro-batch.
                model(inputs).square().sum().backward()
            model(inputs + 1.0).square().sum().backward()
            model.finish_grad_sync()
            groups = model.param_and_grad_buffer.parameter_groups
            steps.append([group.main_grad_buffer.data.clone() for group in groups])
        return {"gradients": steps, "pushed": _pushed_bytes()}

    return _on_core(body, num_distributed_optimizer_instances=2)


Owed = dict[str, tuple[torch.Tensor, int | None]]
"""Rounding losses by parameter: this rank's part, and the axis along which it is split."""


def watch() -> Owed:
    """Return a dictionary that is filled with the losses at the first checkpoint that is saved or
    loaded."""
    owed: Owed = {}
    save, load = training.save_checkpoint, training.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(iteration: int, model: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        result = save(iteration, model, *args, **kwargs)
        if not owed:
            owed.update(_owed(model))
        return result

    @functools.wraps(load)
    def load_checkpoint(model: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        result = load(model, *args, **kwargs)
        owed.update(_owed(model))
        return result

    training.save_checkpoint, training.load_checkpoint = save_checkpoint, load_checkpoint
    return owed


def _owed(model: Sequence[Any]) -> Owed:
    from byteps.torch import operations
    from byteps.torch.wire import feedback

    (chunk,) = model
    names = {parameter: name.split("module.")[-1] for name, parameter in chunk.named_parameters()}
    owed: Owed = {}
    for bucket, config in plan.all_buckets():
        op, elements = bucket.dpu_reduce_op, bucket.grad_data.numel()
        own = feedback.get(op.name)
        assert own is not None
        weight = 1 / len(op.group) if config.average_in_collective else 1
        values = own.float() * weight
        if torch.distributed.get_rank() == op.group[0] and not op.updated:
            values += operations.read_feedback(op.name, elements).float()
        exact = op.bf16_part.parameters if op.bf16_part is not None else ()
        for parameter, (begin, end) in bucket.param_to_index.items():
            if any(parameter is exact_parameter for exact_parameter in exact):
                continue
            axis = getattr(parameter, "partition_dim", 0)
            is_split = getattr(parameter, "tensor_model_parallel", False)
            name = names[parameter]
            if parallel_state.get_pipeline_model_parallel_world_size() > 1:
                name = name.replace("output_layer", "embedding.word_embeddings")
            owed[name] = values[begin:end].view(parameter.shape), axis if is_split else None
    return owed
