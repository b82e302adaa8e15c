"""What one rank runs to try reward models: their training, and their values in each layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megatron_byteps_hf.bridge import auto_bridge
from megatron_byteps_rl import engines, reward, reward_training, trainer
from megatron_byteps_rl.settings import Settings

from . import sums

auto_bridge()

HEAD = "lm_head.weight"


def write(base: Path, folder: Path) -> Path:
    """A reward model that was not trained: the base model with a head of random weights."""
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    hidden = tensors[HEAD].shape[1]
    drawn = torch.randn(1, hidden, generator=torch.Generator().manual_seed(3)) / hidden**0.5
    tensors[HEAD] = drawn.to(tensors[HEAD].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def by_transformers(folder: Path, batch: Any) -> torch.Tensor:
    """Float32 [batch]: the rewards by the whole model of ``transformers``, in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    tensors = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
    head = tensors.pop(HEAD)[0]
    whole = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    missing, unknown = whole.load_state_dict(tensors, strict=False)
    assert missing == [HEAD] and not unknown, (missing, unknown)
    model = whole.model.eval()
    hidden = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        position_ids=batch["position_ids"],
    ).last_hidden_state
    width = batch["prompts"].shape[1]
    last = width + batch["response_mask"].sum(1) - 1
    return hidden[torch.arange(len(last)), last] @ head


def make(config: Any) -> Any:
    """This rank's worker of the reward's model."""
    from megatron_byteps_rl.workers import Reward

    reward.check(config)
    made = Reward(reward.value_worker_config(config[reward.SECTION]))
    made.reset()
    return made


def score(worker: Any, folder: Path, batch: Any) -> dict[str, Any] | None:
    """Rewards of a batch, and the same by ``transformers``; None on ranks without output."""
    made = worker.compute_rewards(reward.columns(batch))
    if made is None:
        return None
    return {"rewards": made["rewards"], "whole": by_transformers(folder, batch.batch)}


def is_frozen(worker: Any) -> bool:
    """Whether the model has no optimizer, no gradients and nothing that could be summed."""
    chunks = worker.engine.module
    return (
        worker.engine.optimizer is None
        and not any(hasattr(chunk, "bucket_groups") for chunk in chunks)
        and engines.held_bytes(chunks) == 0
    )


def train(folder: Path, *, settings: dict[str, Any], steps: int, out: Path | None) -> Any:
    """A short training of the reward's model, which is written however little it has learnt.

    Returns:
        what ``reward_training.train`` does, and ``summed``, the number of sums by BytePS.
    """
    engines.prepare()
    summed = sums.count()
    made = reward_training.train(
        Settings(folder=folder, **settings), steps=steps, out=out, right=0.0
    )
    return SimpleNamespace(**vars(made), summed=len(summed))


def values(folder: Path, *, settings: dict[str, Any], model: Path) -> dict[str, Any]:
    """Rewards of one batch, the same in every layout, by a frozen model in this one."""
    from verl.utils import hf_tokenizer

    engines.prepare()
    made = Settings(folder=folder, reward="megatron", reward_model=model, **settings)
    worker = make(trainer.compose(made.overrides()))
    drawn = reward_training.answers(64, torch.Generator().manual_seed(11))
    batch = reward_training.batch(hf_tokenizer(str(model)), drawn)
    return {"frozen": is_frozen(worker), "scored": score(worker, model, batch)}
