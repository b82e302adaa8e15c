"""A rollout of verl's: generation by ``transformers``, from weights handed over in memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from verl.utils.device import get_device_id
from verl.workers.rollout import base
from verl.workers.rollout.base import BaseRollout

from .settings import ROLLOUTS


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Responses to prompts, on the CPU; all of a batch have the same padded length."""

    prompts: torch.Tensor
    """int64 [batch, prompt]; padded on the left."""
    responses: torch.Tensor
    """int64 [batch, response]; padded on the right."""
    prompt_mask: torch.Tensor
    """int64 [batch, prompt]; 0 where it is padded."""
    response_mask: torch.Tensor
    """int64 [batch, response]; 1 up to the end-of-text token, with it."""
    log_probs: torch.Tensor
    """float32 [batch, response]: of each token when it was drawn; 0 where it is padded."""


class TransformersRollout(BaseRollout):
    """One whole model on each rank, on its device, whatever the layout of training.

    It computes in fp32, with the weights that training has in bf16.
    """

    first_token_at: float | None = None
    """On the monotonic clock, of the last ``generate()``."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, **kwargs: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.build()

    def build(self) -> None:
        """Make the model, without weights yet."""
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_config(
            self.model_config.hf_config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._model.to(get_device_id())
        self._model.requires_grad_(False)
        self._ready = False

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """The weights stay."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Take the weights of training, by their Hugging Face names.

        Raises:
            ValueError: a tensor is missing, unknown or of another shape.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"rollout.name=transformers takes whole tensors, not {wire_format}")
        mine = dict(self._model.named_parameters(remove_duplicate=False))
        seen = set()
        for name, tensor in weights:
            if name not in mine:
                raise ValueError(f"rollout: training sent {name}, which the model has not")
            if tensor.shape != mine[name].shape:
                raise ValueError(
                    f"rollout: training sent {name} as {tuple(tensor.shape)}, and the model has "
                    f"{tuple(mine[name].shape)}"
                )
            mine[name].data.copy_(tensor)
            seen.add(mine[name].data_ptr())
        missing = [name for name, own in mine.items() if own.data_ptr() not in seen]
        if missing:
            raise ValueError(f"rollout: training did not send {', '.join(missing)}")
        self._ready = True

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], *, length: int, temperature: float, seed: int
    ) -> Generated:
        """Go on after each prompt, for ``length`` tokens at most.

        Args:
            prompts: tokens, each list of its own length.
            length: of the responses, in tokens.
            temperature: 0 takes the most likely token each time.
            seed: decides what is drawn.

        Raises:
            RuntimeError: no weights have come yet.
        """
        if not self._ready:
            raise RuntimeError("rollout: generate() before the first update_weights()")
        tokenizer = self.model_config.tokenizer
        pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        width = self.config.prompt_length
        rows = [[pad] * (width - len(tokens)) + list(tokens) for tokens in prompts]
        here = self._model.device
        ids = torch.tensor(rows, device=here)
        mask = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in prompts], device=here)
        generator = torch.Generator(here).manual_seed(seed)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        drawn: list[torch.Tensor] = []
        log_probs: list[torch.Tensor] = []
        masks: list[torch.Tensor] = []
        going = torch.ones(len(prompts), dtype=torch.bool, device=here)
        past, whole, step, place = None, mask, ids, positions
        for _ in range(length):
            out = self._model(
                input_ids=step, attention_mask=whole, position_ids=place, past_key_values=past
            )
            past = out.past_key_values
            token, log_prob = draw(out.logits[:, -1].float(), temperature, generator)
            if not drawn:
                self.first_token_at = time.monotonic()
            drawn.append(torch.where(going, token, pad))
            log_probs.append(torch.where(going, log_prob, 0.0))
            masks.append(going.long())
            going = going & (token != end)
            whole = torch.cat([whole, masks[-1][:, None]], 1)
            step, place = drawn[-1][:, None], place[:, -1:] + 1
        return Generated(
            prompts=ids.cpu(),
            responses=torch.stack(drawn, 1).cpu(),
            prompt_mask=mask.cpu(),
            response_mask=torch.stack(masks, 1).cpu(),
            log_probs=torch.stack(log_probs, 1).cpu(),
        )


def draw(
    logits: torch.Tensor, temperature: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row, and its log-probability: int64 and float32 [batch].

    Args:
        logits: float32 [batch, vocabulary].
        temperature: 0 takes the most likely token.
        generator: on the device of the logits.
    """
    if temperature <= 0:
        scores = torch.log_softmax(logits, -1)
        token = logits.argmax(-1)
    else:
        scores = torch.log_softmax(logits / temperature, -1)
        token = torch.multinomial(scores.exp(), 1, generator=generator)[:, 0]
    return token, scores.gather(-1, token[:, None])[:, 0]


def register() -> None:
    """Make those of this package rollouts of verl's."""
    for name, place in ROLLOUTS.items():
        base._ROLLOUT_REGISTRY[name, "async"] = f"{__package__}.{place}"
