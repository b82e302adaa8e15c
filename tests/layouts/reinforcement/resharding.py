"""What one rank runs to compare a model in the layout of training with the same, resharded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import AutoConfig, AutoTokenizer

from megatron_byteps_hf.bridge import auto_bridge
from megatron_byteps_rl import engines, task

auto_bridge()

PROMPTS = ("3+4=", "7+7=", "6+", "5+3=", "3")
LENGTH = 3


def compare(folder: Path, *, model: Path, tensor: int, pipeline: int, rollout: int) -> Any:
    """Reshard a model with random weights in fp32, and again after they changed.

    Returns:
        for each time: ``trained`` and ``resharded``, logits [batch, length, vocabulary] of the same
        tokens; what was generated, with and without randomness; the reshard's cost.
    """
    engines.prepare()
    parallel_state.initialize_model_parallel(tensor, pipeline)
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    provider, trained = _trained(model, tensor, pipeline)
    made = _rollout(model, rollout)
    made.follow(SimpleNamespace(provider=provider, module=[trained], peft_cls=None))
    seen = []
    tokens = torch.arange(24).reshape(4, 6) % len(task.VOCABULARY)
    for _ in range(2):
        asyncio.run(made.update_weights(iter(())))
        seen.append(
            {
                "trained": _logits(trained, tokens),
                "resharded": made.logits(tokens),
                "cost": made.cost,
                **_generated(made),
            }
        )
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(1.5).sub_(0.01)
    return seen


def _trained(model: Path, tensor: int, pipeline: int) -> tuple[Any, Any]:
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnBackend

    provider = AutoBridge.from_hf_pretrained(str(model)).to_megatron_provider(load_weights=False)
    for name, value in {
        **engines.transformer(),
        "attention_backend": AttnBackend.unfused,
        "transformer_layer_spec": local_layer_spec,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "bf16": False,
        "fp16": False,
    }.items():
        setattr(provider, name, value)
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    torch.manual_seed(7)
    return provider, provider.provide().eval()


def _rollout(model: Path, tensor: int) -> Any:
    from megatron_byteps_rl.megatron_rollout import MegatronRollout

    return MegatronRollout(
        SimpleNamespace(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=1,
            data_parallel_size=1,
            prompt_length=task.PROMPT_TOKENS + 1,
            # The engine has to make three batches of five prompts.
            max_num_seqs=2,
        ),
        SimpleNamespace(
            hf_config=AutoConfig.from_pretrained(model),
            tokenizer=AutoTokenizer.from_pretrained(model),
        ),
        None,
    )


def _generated(rollout: Any) -> dict[str, Any]:
    ask = rollout.model_config.tokenizer
    prompts = [ask(text).input_ids for text in PROMPTS]
    before = torch.get_rng_state()
    made = {
        name: rollout.generate(prompts, length=LENGTH, temperature=temperature, seed=seed)
        for name, temperature, seed in (
            ("drawn", 1.0, 5),
            ("again", 1.0, 5),
            ("other", 1.0, 6),
            ("hot", 2.0, 5),
            ("greedy", 0.0, 0),
        )
    }
    return {
        **made,
        "generator_untouched": torch.equal(before, torch.get_rng_state()),
        "asked": [list(_asked(rollout, prompts, made[name])) for name in ("drawn", "hot")],
        "best": [list(_asked(rollout, prompts, made["greedy"]))],
    }


def _asked(rollout: Any, prompts: list[list[int]], made: Any) -> Iterator[torch.Tensor]:
    """Logits [drawn, vocabulary] of each row's response, computed at once and without a cache."""
    for prompt, response, mask in zip(prompts, made.responses, made.response_mask, strict=True):
        drawn = response[: int(mask.sum())]
        tokens = torch.cat([torch.tensor(prompt), drawn])[None]
        yield rollout.logits(tokens)[0, len(prompt) - 1 : -1]


@torch.no_grad()
def _logits(trained: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[batch, length, vocabulary] on every rank, by Megatron's own schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    places = torch.arange(tokens.shape[1]).expand_as(tokens)

    def forward(batches: Any, model: Any) -> Any:
        output = model(tokens, places, None)
        return output, lambda logits, **_: (logits.sum(), {"logits": logits})

    done = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=None,
        model=trained,
        num_microbatches=1,
        seq_length=tokens.shape[1],
        micro_batch_size=tokens.shape[0],
        forward_only=True,
    )
    whole = torch.empty(*tokens.shape, len(task.VOCABULARY))
    if parallel_state.is_pipeline_last_stage():
        mine = done[0]["logits"].contiguous()
        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine, group)
        whole = torch.cat(parts, -1).contiguous()
    dist.broadcast(
        whole,
        parallel_state.get_pipeline_model_parallel_last_rank(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    return whole
