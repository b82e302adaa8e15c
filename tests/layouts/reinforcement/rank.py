"""What one rank runs: verl's workers, without Ray and without its trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers  # noqa: F401
import verl.trainer.ppo.ray_trainer
import verl.workers.engine_workers  # noqa: F401
from omegaconf import open_dict
from tensordict import TensorDict
from verl import DataProto
from verl.utils import hf_tokenizer
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from megatron_byteps_hf.bridge import auto_bridge
from megatron_byteps_rl import memory, reward, task, trainer
from megatron_byteps_rl.engines import held_bytes
from megatron_byteps_rl.settings import Settings

from . import rewards, sums
from .runs import ROWS, STEPS

auto_bridge()

PROMPTS = [(a, b) for a in range(0, 10, 3) for b in (2, 9)]
assert len(PROMPTS) == ROWS


class Roles:
    """Actor, rollout, reference, critic and reward of one rank, as verl's trainer makes them."""

    def __init__(self, settings: Settings) -> None:
        from megatron_byteps_rl.workers import ActorRolloutRef

        config = trainer.compose(settings.overrides())
        with open_dict(config):
            config.actor_rollout_ref.actor.optim.total_training_steps = STEPS
            config.critic.optim.total_training_steps = STEPS
        self.config = config
        self.tokenizer = hf_tokenizer(str(settings.model))
        self.actor = ActorRolloutRef(config=config.actor_rollout_ref, role="actor_rollout_ref")
        self.critic = self._critic() if settings.algorithm == "ppo" else None
        self.reward = rewards.make(config) if settings.reward_model else None
        self.actor.init_model()
        self.hand_over(0)

    def _critic(self) -> Any:
        from megatron_byteps_rl.workers import Critic

        critic = omega_conf_to_dataclass(self.config.critic)
        made = Critic(reward.value_worker_config(self.config.critic))
        made.reset()
        made.set_loss_fn(partial(value_loss, config=critic))
        return made

    def hand_over(self, step: int) -> None:
        asyncio.run(self.actor.update_weights(global_steps=step, mode="naive"))

    def generate(self, pairs: list[tuple[int, int]], seed: int, temperature: float) -> DataProto:
        prompts = np.empty(len(pairs), dtype=object)
        prompts[:] = [self.tokenizer(task.prompt(a, b)).input_ids for a, b in pairs]
        asked = DataProto(non_tensor_batch={"prompt_ids": prompts})
        asked.meta_info = {"temperature": temperature, "seed": seed}
        made = self.actor.generate_sequences(asked)
        made.meta_info["temperature"] = 1.0
        return made


def _columns(made: DataProto, **more: Any) -> TensorDict:
    data = left_right_2_no_padding(made.to_tensordict())
    tu.assign_non_tensor(data, **more)
    return data


def _inferred(function: Callable[..., Any], made: DataProto, name: str) -> torch.Tensor | None:
    """[batch, response] on the ranks that have the output, None on others."""
    data = _columns(made, calculate_entropy=False, compute_loss=False)
    output = function(data)
    if output is None:
        return None
    return no_padding_2_padding(tu.get(output, name), data).float() * made.batch["response_mask"]


def _names(engine: Any) -> list[str]:
    return [
        name for m in engine.module for group in m.bucket_groups for name in sums.of_group(group)
    ]


def _watched(engines: Iterable[Any]) -> dict[str, int]:
    """Bytes of all models' buffers by phase: the most while an engine trains, and, once
    ``generate`` has asked, in the rollout."""
    engines = list(engines)
    held = {"training": 0}

    def watch(engine: Any) -> None:
        step = engine.optimizer_step

        def watched() -> Any:
            now = sum(held_bytes(one.module) for one in engines)
            held["training"] = max(held["training"], now)
            return step()

        engine.optimizer_step = watched

    for engine in engines:
        watch(engine)
    return held


def train(folder: Path, *, settings: dict[str, Any], samples: int) -> dict[str, Any]:
    """Steps of all models in one job: the critic's, with PPO, and then the actor's."""
    from megatron_byteps_rl.workers import checksum

    roles = Roles(Settings(folder=folder, **settings))
    seen = sums.count()
    rows = len(PROMPTS) * samples
    size = roles.actor.world_size // (settings.get("tensor", 1) * settings.get("pipeline", 1))
    sizes = {"global_batch_size": rows * size, "mini_batch_size": rows * size}
    fixed = {"epochs": 1, "seed": 1, "dataloader_kwargs": {"shuffle": False}}
    copy = roles.actor.actor.engine.get_data_parallel_rank()
    workers = {"actor": roles.actor.actor, "critic": roles.critic}
    engines = {role: worker.engine for role, worker in workers.items() if worker is not None}
    held = _watched(engines.values())
    apart, scored = [], []
    frozen = checksum(roles.reward.engine) if roles.reward else None
    for step in range(STEPS):
        made = roles.generate(PROMPTS * samples, seed=step, temperature=1.0)
        # The ranks of a copy must train on the same.
        drawn = torch.Generator().manual_seed(100 * step + copy)
        made.batch["responses"] = torch.randint(4, 14, (rows, 3), generator=drawn)
        made.batch["response_mask"][:] = 1
        whole = torch.cat([made.batch["prompts"], made.batch["responses"]], 1)
        made.batch["input_ids"], made.batch["attention_mask"] = whole, torch.ones_like(whole)
        made.batch["position_ids"] = torch.arange(whole.shape[1]).expand_as(whole).clone()
        zeros = torch.zeros(rows, 3)
        noise = torch.randn(rows, 3, generator=drawn)
        made.batch.update({"old_log_probs": zeros - 2, "ref_log_prob": zeros - 2})
        if roles.reward is not None:
            scored.append(rewards.score(roles.reward, settings["reward_model"], made))
        made.batch.update({"values": zeros, "advantages": noise, "returns": noise * 0.5})
        if roles.critic is not None:
            roles.critic.train_mini_batch(_columns(made, **sizes, **fixed))
        roles.actor.update_actor(
            _columns(made, **sizes, **fixed, calculate_entropy=False, compute_loss=True)
        )
        roles.hand_over(step + 1)
        held["rollout"] = sum(held_bytes(engine.module) for engine in engines.values())
        apart.append(agreement(roles, samples))
    result = {
        "checksums": {role: checksum(engine) for role, engine in engines.items()},
        "names": {role: _names(engine) for role, engine in engines.items()},
        "summed": seen,
        "apart": apart,
        "reshard": roles.actor.reshard_cost(),
        "held_bytes": held,
        "scored": scored,
        "peaks": memory.peaks(),
    }
    if roles.reward is not None:
        assert rewards.is_frozen(roles.reward), "the reward's model could be trained"
        assert checksum(roles.reward.engine) == frozen, "the reward's model was trained"
    roles.actor.leave()
    return result


def agreement(roles: Roles, samples: int) -> float | None:
    """Largest difference of log-probabilities between rollout and training, of drawn tokens.

    None on ranks that have no logits.
    """
    made = roles.generate(PROMPTS * samples, seed=7, temperature=1.0)
    # All ranks of a copy ask about what its first rank drew.
    group = torch.distributed.group.WORLD
    for name in ("responses", "response_mask", "input_ids", "attention_mask", "position_ids"):
        torch.distributed.broadcast(made.batch[name], 0, group=group)
    torch.distributed.broadcast(made.batch["rollout_log_probs"], 0, group=group)
    trained = _inferred(roles.actor.compute_log_prob, made, "log_probs")
    if trained is None:
        return None
    return float((trained - made.batch["rollout_log_probs"]).abs().max())
