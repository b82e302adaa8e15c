"""Rank programs: training of a Hugging Face model, and logits by ``transformers`` for comparison.

The fork server imports this module with all that the programs need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pretrain_dpu_gpt
import torch
import transformers
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_byteps_hf.bridge import auto_bridge
from tests.layouts.gpt.layout import RankSeen
from tests.layouts.gpt.rank import run

from .runs import VOCABULARY, make

# This call must run before any other import of Megatron-Bridge.
auto_bridge()
from megatron.bridge.peft import base  # noqa: E402

BEFORE, AFTER = "before", "after"
"""Folders of a job: the model before the first step and after the last step."""
_BATCH, _LENGTH = 2, 16


@dataclass(kw_only=True)
class Seen:
    """Values that a rank recorded."""

    training: RankSeen
    logits: torch.Tensor | None
    """Logits of Megatron's model after the last step, [batch, sequence, vocabulary]; None except on
    the last pipeline stage."""
    trained: int
    """Number of trained elements of this rank's parameters."""
    frozen_changed: list[str]
    """Names of frozen parameters that training changed."""
    without_gradient: list[str]
    """Names of trained parameters whose gradient was zero in all steps, without embeddings: the
    text may not contain a rank's part of the vocabulary."""


def make_model(folder: Path, name: str) -> None:
    """Write a tiny model into the job's folder."""
    make(name, folder / name)


def _sample() -> torch.Tensor:
    """Make tokens, the same in every process, [batch, sequence]."""
    return torch.arange(_BATCH * _LENGTH).view(_BATCH, _LENGTH) * 7 % VOCABULARY


def reference_logits(folder: Path, model: str, adapter: str | None = None) -> torch.Tensor:
    """Compute logits with ``transformers``, with a ``peft`` adapter on the model if there
    is one."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        loaded = peft.PeftModel.from_pretrained(loaded, adapter)
    with torch.no_grad():
        return loaded.eval()(_sample()).logits


def _logits(models: list[torch.nn.Module]) -> torch.Tensor | None:
    """Compute logits with the sharded model and assemble them."""
    tokens = _sample()
    positions = torch.arange(_LENGTH).expand(_BATCH, _LENGTH)
    masked = torch.triu(torch.ones(_LENGTH, _LENGTH, dtype=torch.bool), 1)[None, None]
    seen: list[torch.Tensor] = []

    def forward(_: Any, model: torch.nn.Module) -> Any:
        def keep(output: torch.Tensor) -> Any:
            seen.append(tensor_parallel.gather_from_tensor_model_parallel_region(output))
            return output.sum(), {}

        return model(tokens, positions, masked), keep

    for model in models:
        model.eval()
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=models,
            num_microbatches=1,
            seq_length=_LENGTH,
            micro_batch_size=_BATCH,
            forward_only=True,
        )
    return seen[0] if parallel_state.is_pipeline_last_stage() else None


def train(
    folder: Path,
    arguments: Sequence[str],
    environment: dict[str, str] | None = None,
    mended: bool = True,
) -> Seen:
    """Train and record the results.

    Args:
        arguments: Arguments of the entry script, without ``--hf-save``.
        mended: False removes the fix that gives gradients to adapters in recomputed layers.
    """
    if not mended:
        base.maybe_enable_recompute_inputs_grad = lambda model: set()
    made: list[Any] = []
    models: list[torch.nn.Module] = []
    frozen: dict[str, torch.Tensor] = {}
    gradients: dict[str, float] = {}
    logits: list[torch.Tensor | None] = []
    make_model_of, pretrain = pretrain_dpu_gpt.hugging_face_model, pretrain_dpu_gpt.pretrain

    def note_model(argv: Sequence[str]) -> Any:
        made.append(make_model_of(argv))
        return made[0]

    def begin(wrapped: list[torch.nn.Module]) -> list[torch.nn.Module]:
        models.extend(wrapped)
        for chunk, model in enumerate(wrapped):
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    gradients[f"{chunk}/{name}"] = 0.0
                else:
                    frozen[f"{chunk}/{name}"] = parameter.detach().clone()
            _note_gradients(model, chunk)
        made[0].write(folder / BEFORE)
        return wrapped

    def _note_gradients(model: Any, chunk: int) -> None:
        finish = model.finish_grad_sync

        def finish_grad_sync(*args: Any, **kwargs: Any) -> None:
            finish(*args, **kwargs)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    gradients[f"{chunk}/{name}"] += float(parameter.main_grad.abs().sum())

        model.finish_grad_sync = finish_grad_sync

    def look(container: Any, *args: Any, **kwargs: Any) -> None:
        container.model.post_wrap_hooks.append(begin)
        pretrain(container, *args, **kwargs)
        logits.append(_logits(models))

    pretrain_dpu_gpt.hugging_face_model, pretrain_dpu_gpt.pretrain = note_model, look
    training = run([*arguments, "--hf-save", str(folder / AFTER)])
    now = {f"{c}/{n}": p for c, m in enumerate(models) for n, p in m.named_parameters()}
    return Seen(
        training=training,
        logits=logits[0],
        trained=sum(p.numel() for p in now.values() if p.requires_grad),
        frozen_changed=[name for name, old in frozen.items() if not torch.equal(old, now[name])],
        without_gradient=[
            name
            for name, total in gradients.items()
            if total == 0.0 and "word_embeddings" not in name
        ],
    )
