"""verl's PPO trainer where no inference server runs: its workers generate by themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.ray import RayResourcePool, ResourcePoolManager
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.utils import Role, need_critic, need_reference_policy
from verl.utils.device import get_device_name

from . import memory, reward, task
from .reward_group import ModelReward


def compose(overrides: Sequence[str]) -> DictConfig:
    """verl's configuration of its PPO trainer, with these overrides.

    Raises:
        ValueError: an override that verl does not know.
    """
    from hydra import compose as of_hydra
    from hydra import initialize_config_module
    from hydra.errors import HydraException

    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = of_hydra("ppo_trainer", overrides=list(overrides))
    except HydraException as error:
        raise ValueError(f"verl's configuration: {error}") from error
    OmegaConf.resolve(config)
    return config


class Pools(ResourcePoolManager):
    """Places for ranks: each a core, and a GPU where verl's platform has GPUs."""

    def create_resource_pool(self) -> None:
        use_gpu = get_device_name() != "cpu"
        for name, counts in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=counts, use_gpu=use_gpu, max_colocate_count=1, name_prefix=name
            )
        if use_gpu:
            self._check_resource_available()


class _Servers:
    """Stands for verl's inference servers: there are none, and the workers are the client."""

    def __init__(self, workers: Any) -> None:
        self._workers = workers

    @classmethod
    def create(cls, *, worker_group: Any, **kwargs: Any) -> _Servers:
        return cls(worker_group)

    def get_client(self) -> Any:
        return self._workers

    def get_replicas(self) -> list[Any]:
        return []

    def start_profile(self) -> None:
        """The workers' profiler sees generation."""

    def stop_profile(self) -> None: ...


class Generation:
    """Responses with their rewards, as verl's agent loops give them.

    The rule's score is ``acc``, and the reward unless a model gives it.
    """

    def __init__(self, config: DictConfig, workers: Any) -> None:
        from verl.utils import hf_tokenizer

        self._workers = workers
        self._rollout = config.actor_rollout_ref.rollout
        self._asks_a_model = config.get(reward.SECTION) is not None
        tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._reward = load_reward_manager(config, tokenizer)
        self._calls = 0

    @classmethod
    def create(cls, *, config: DictConfig, llm_client: Any, **kwargs: Any) -> Generation:
        return cls(config, llm_client)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate on all ranks, and score each response by verl's reward manager."""
        begin = time.monotonic()
        greedy = not prompts.meta_info.get("do_sample", True)
        asked = DataProto(non_tensor_batch={"prompt_ids": prompts.non_tensor_batch["prompt_ids"]})
        asked.meta_info = {
            "temperature": 0.0 if greedy else self._rollout.temperature,
            "seed": self._rollout.seed + self._calls,
        }
        self._calls += 1
        copies = self._workers.world_size // self._rollout.tensor_model_parallel_size
        asked, padding = pad_dataproto_to_divisor(asked, copies)
        made = unpad_dataproto(self._workers.generate_sequences(asked), padding)
        generated = time.monotonic()
        scores = self._scores(made, prompts)
        if not self._asks_a_model:
            rewards = torch.zeros_like(made.batch["rollout_log_probs"])
            last = made.batch["response_mask"].sum(1) - 1
            rewards[torch.arange(len(rewards)), last] = torch.tensor(scores)
            made.batch["rm_scores"] = rewards
        made.non_tensor_batch["acc"] = np.array(scores, dtype=np.float32)
        ended = time.monotonic()
        made.meta_info = {
            "timing": {"generate": generated - begin, "score": ended - generated},
            "reward_extra_keys": ["acc"],
        }
        return made

    def _scores(self, made: DataProto, prompts: DataProto) -> list[float]:
        # The reward manager wants to see both.
        seen = DataProto(
            batch=made.batch,
            non_tensor_batch={
                name: prompts.non_tensor_batch[name]
                for name in ("data_source", "reward_model", "extra_info")
            },
        )
        single = self._reward.run_single

        async def all_of_them() -> list[dict[str, Any]]:
            return await asyncio.gather(*(single(seen[i : i + 1]) for i in range(len(seen))))

        return [float(r["reward_score"]) for r in self._loop.run_until_complete(all_of_them())]


@contextmanager
def _without_servers() -> Iterator[None]:
    """verl's trainer takes the class of its servers by this name, and has no setting for it."""
    theirs = ray_trainer.LLMServerManager
    ray_trainer.LLMServerManager = _Servers
    try:
        yield
    finally:
        ray_trainer.LLMServerManager = theirs


class Trainer(ModelReward):
    """verl's trainer, with more metrics of each step: how many responses are right by the rule, and
    what the way to the rollout took."""

    def _update_actor(self, batch: DataProto) -> DataProto:
        right = float(np.mean(batch.non_tensor_batch["acc"]))
        waited = [s for s in self.actor_rollout_wg.first_token_s() if s is not None]
        output = super()._update_actor(batch)
        output.meta_info["metrics"]["rule/accuracy"] = [right]
        if waited:
            output.meta_info["metrics"]["rollout/first_token_seconds"] = [max(waited)]
        # Of the weights that this step's responses were generated with.
        costs = [cost for cost in self.actor_rollout_wg.reshard_cost() if cost is not None]
        for phase, most in memory.most(self.actor_rollout_wg.memory_peaks()).items():
            output.meta_info["metrics"][f"{memory.METRIC}{phase}"] = [most]
        if costs:
            output.meta_info["metrics"] |= {
                "reshard/seconds": [max(cost["seconds"] for cost in costs)],
                "reshard/sent_bytes": [sum(cost["sent_bytes"] for cost in costs)],
                "reshard/kept_bytes": [sum(cost["kept_bytes"] for cost in costs)],
            }
        return output


def make_trainer(config: DictConfig) -> RayPPOTrainer:
    """verl's trainer with its workers, which lie in one process a rank. Ray must be there.

    Raises:
        ValueError, AssertionError: the configuration contradicts itself.
    """
    from verl.single_controller.ray import RayWorkerGroup
    from verl.utils import hf_tokenizer
    from verl.utils.config import validate_config

    from .workers import ActorRolloutRef, Critic

    reference, critic = need_reference_policy(config), need_critic(config)
    validate_config(config, use_reference_policy=reference, use_critic=critic)
    asks_a_model = config.get(reward.SECTION) is not None
    if asks_a_model:
        reward.check(config)
    actor = Role.ActorRolloutRef if reference else Role.ActorRollout
    roles = {actor: ray.remote(ActorRolloutRef)}
    if critic:
        roles[Role.Critic] = ray.remote(Critic)
    pool = "ranks"
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    trainer = Trainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=roles,
        resource_pool_manager=Pools(
            resource_pool_spec={pool: [config.trainer.n_gpus_per_node] * config.trainer.nnodes},
            mapping=dict.fromkeys([*roles, *([Role.RewardModel] if asks_a_model else [])], pool),
        ),
        ray_worker_group_cls=RayWorkerGroup,
        train_dataset=task.Sums(tokenizer),
        val_dataset=task.Sums(tokenizer),
        collate_fn=task.collate,
        device_name=config.trainer.device,
    )
    with _without_servers():
        trainer.init_workers()
    return trainer


def checksums(trainer: RayPPOTrainer) -> dict[str, list[str]]:
    """SHA-256 over the parameters of actor and critic, of each rank."""
    groups = {"actor": trainer.actor_rollout_wg}
    if trainer.use_critic:
        groups["critic"] = trainer.critic_wg
    return {role: list(group.checksum()) for role, group in groups.items()}


__all__ = ["Generation", "Pools", "Trainer", "checksums", "compose", "make_trainer"]
