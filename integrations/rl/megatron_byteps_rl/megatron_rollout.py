"""A rollout of verl's: Megatron's inference engine, in a layout of its own.

The weights come from training by ``megatron.core.resharding``, from rank to rank. verl sets the
layout: ``rollout.tensor_model_parallel_size`` ranks share a copy of the model, and each copy
generates for its part of the prompts.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines import StaticInferenceEngine
from megatron.core.inference.inference_request import InferenceRequest
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.shards import build_inference_pg_collection
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from verl.workers.rollout.base import BaseRollout

from .resharding import Cost, reshard
from .rollout import Generated, draw


def in_layout(provider: Any, trained: Sequence[Any], tensor: int) -> Any:
    """The model that ``provider`` made for training, in another layout and without weights yet.

    All ranks call it together.

    Args:
        provider: of megatron-bridge.
        trained: this rank's part of the model in training.
        tensor: ranks that share a copy of the new model.

    Returns:
        This rank's part, on the device of training and of the same type.
    """
    groups = build_inference_pg_collection(
        dist.get_world_size(), tp_size=tensor, pp_size=1, cp_size=1, ep_size=1, expt_tp_size=tensor
    )
    # A shallow copy: the layer specification and the groups are shared, or replaced.
    mine = copy.copy(provider)
    mine.tensor_model_parallel_size = mine.expert_tensor_parallel_size = tensor
    mine.pipeline_model_parallel_size = mine.context_parallel_size = 1
    mine.expert_model_parallel_size = 1
    mine.virtual_pipeline_model_parallel_size = None
    mine.sequence_parallel = False
    # Every weight comes from training.
    mine.perform_initialization = False
    core = unwrap_model(trained[0])
    # Training pads the vocabulary for its own layout, and the same rows must be here.
    mine.vocab_size, mine.should_pad_vocab = core.vocab_size, False
    mine._pg_collection = groups
    model = mine.provide(pre_process=True, post_process=True)
    like = next(core.parameters())
    model.to(like.device)
    if like.dtype in (torch.bfloat16, torch.float16):
        model = Float16Module(mine, model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


class _Controller(TextGenerationController):
    """Keeps the log-probability of each token as it is drawn: with the temperature, in fp32."""

    def __init__(self, model: GPTInferenceWrapper, tokenizer: Any, words: int, seed: int) -> None:
        super().__init__(model, tokenizer)
        self.sampling_rng.manual_seed(seed)
        self._words = words
        self._drawn: list[torch.Tensor] = []
        self.first_token_at: float | None = None

    def sample_from_logits(
        self,
        last_token_logits: torch.Tensor,
        sampling_params: SamplingParams | None = None,
        vocab_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        assert sampling_params is not None  # of the request, always
        logits = last_token_logits[:, : self._words].float()  # without the padding
        token, log_prob = draw(logits, sampling_params.temperature, self.sampling_rng)
        self._drawn.append(log_prob)
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        return token

    def generate_all_output_tokens_static_batch(
        self, active_requests: Any, active_streams: Any = None
    ) -> Any:
        self._drawn.clear()
        done = super().generate_all_output_tokens_static_batch(active_requests, active_streams)
        log_probs = torch.stack(self._drawn, 1)
        # Tokens are drawn for all rows from the end of the shortest prompt on.
        first = min(len(request.prompt_tokens) for request in done.values())
        for row, request in enumerate(done.values()):
            request.generated_log_probs = log_probs[row, len(request.prompt_tokens) - first :]
        return done


class MegatronRollout(BaseRollout):
    """Megatron's static engine over the model in the layout of the rollout."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, **kwargs: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        for name in ("pipeline_model_parallel_size", "data_parallel_size"):
            if (size := getattr(self.config, name)) != 1:
                raise ValueError(f"rollout.name=megatron: rollout.{name}={size}: only 1 is known")
        self._tensor = self.config.tensor_model_parallel_size
        self._model: Any = None
        self._trained: Sequence[Any] = ()
        self.cost: Cost | None = None
        """Of the last reshard."""
        self.first_token_at: float | None = None
        """On the monotonic clock, of the last ``generate()``."""

    def follow(self, engine: Any) -> None:
        """Take the weights of this engine of verl's from now on; all ranks call it together.

        Raises:
            ValueError: the rollout's tensor parallelism does not divide the model, or the model has
                experts or LoRA adapters.
        """
        provider = engine.provider
        if engine.peft_cls is not None or provider.num_moe_experts:
            kind = "LoRA adapters" if engine.peft_cls is not None else "experts"
            raise ValueError(f"rollout.name=megatron does not know {kind}: use another rollout")
        heads = provider.num_attention_heads
        for count, name in (
            (heads, "attention heads"),
            (provider.num_query_groups or heads, "query groups"),
            (unwrap_model(engine.module[0]).vocab_size, "words"),
        ):
            if count % self._tensor:
                raise ValueError(
                    f"rollout.tensor_model_parallel_size={self._tensor} does not divide the "
                    f"model's {count} {name}"
                )
        self._trained = engine.module
        self._model = in_layout(provider, engine.module, self._tensor)

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """The weights stay; the cache of keys and values ends with each batch."""

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], **kwargs: Any
    ) -> None:
        """Take the weights of training, rank by rank.

        Args:
            weights: verl's export of whole tensors, which is left alone: it starts when it is read.

        Raises:
            RuntimeError: before ``follow()``.
        """
        if self._model is None:
            raise RuntimeError("rollout: update_weights() before follow()")
        world = dist.group.WORLD
        assert world is not None
        self.cost = reshard(self._trained, self._model, world)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 [batch, length, vocabulary] of int64 [batch, length], on the model's device; the
        ranks of a copy call it together, with the same tokens."""
        tokens = tokens.to(next(self._model.parameters()).device)
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self._model(tokens, places, None, runtime_gather_output=True).float()

    def generate(
        self, prompts: list[list[int]], *, length: int, temperature: float, seed: int
    ) -> Generated:
        """Go on after each prompt; as ``TransformersRollout.generate``.

        The ranks of a copy call it together, with the same arguments.

        Raises:
            RuntimeError: no weights have come yet.
        """
        if self.cost is None:
            raise RuntimeError("rollout: generate() before the first update_weights()")
        tokenizer = self.model_config.tokenizer
        end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        width = self.config.prompt_length
        requests = [
            InferenceRequest(
                request_id=number,
                prompt="",
                prompt_tokens=list(tokens),
                sampling_params=SamplingParams(
                    temperature=temperature, num_tokens_to_generate=length
                ),
            )
            for number, tokens in enumerate(prompts)
        ]
        here = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        # The engine seeds torch's generator, which is training's.
        with warnings.catch_warnings(), InferenceMode.active(), torch.random.fork_rng(here):
            # The static engine announces that it will go some day.
            warnings.simplefilter("ignore")
            engine = self._engine(len(prompts), width + length, seed)
            done = engine.generate(inference_requests=requests)
        self.first_token_at = engine.controller.first_token_at
        shape = (len(prompts), length)
        responses = torch.full(shape, pad, dtype=torch.long)
        masks = torch.zeros(shape, dtype=torch.long)
        log_probs = torch.zeros(shape)
        for row, request in enumerate(done):
            tokens = request.generated_tokens.tolist()
            # The engine leaves out the end-of-text token, which alone ends a response early.
            tokens += [end] * (len(tokens) < length)
            responses[row, : len(tokens)] = torch.tensor(tokens)
            masks[row, : len(tokens)] = 1
            log_probs[row, : len(tokens)] = request.generated_log_probs[: len(tokens)].cpu()
        return Generated(
            prompts=torch.tensor([[pad] * (width - len(t)) + list(t) for t in prompts]),
            responses=responses,
            prompt_mask=torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in prompts]),
            response_mask=masks,
            log_probs=log_probs,
        )

    def _engine(self, rows: int, length: int, seed: int) -> StaticInferenceEngine:
        """An engine for one batch; its cache of keys and values goes with it."""
        rows = min(rows, self.config.max_num_seqs)
        context = StaticInferenceContext(rows, length)
        context.config.pg_collection = unwrap_model(self._model).pg_collection
        tokenizer = self.model_config.tokenizer
        controller = _Controller(
            GPTInferenceWrapper(self._model, context),
            # Texts are verl's matter.
            SimpleNamespace(eod=tokenizer.eos_token_id, detokenize=lambda tokens: ""),
            self.model_config.hf_config.vocab_size,
            seed,
        )
        return StaticInferenceEngine(controller, rows, random_seed=seed + 1, legacy=True)
