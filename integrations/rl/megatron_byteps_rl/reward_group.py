"""verl's PPO trainer with one more worker group: the reward's model."""

from __future__ import annotations

from typing import Any

import ray
import torch
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor
from verl.single_controller.ray import RayClassWithInitArgs
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import Role
from verl.utils import tensordict_utils as tu

from . import reward


class ModelReward(RayPPOTrainer):
    """verl's trainer; where there is a section ``reward_worker``, its model gives the rewards.

    The worker lies in the processes of the other roles, as a worker group of its own.
    """

    @property
    def resource_pool_to_cls(self) -> dict[Any, dict[str, RayClassWithInitArgs]]:
        """Roles by pool. verl assigns it when it begins to make workers, and adds its roles."""
        return self._roles_of_pools

    @resource_pool_to_cls.setter
    def resource_pool_to_cls(self, pools: dict[Any, dict[str, RayClassWithInitArgs]]) -> None:
        self._roles_of_pools = pools
        if self.asks_a_model:
            from .workers import Reward

            pool = self.resource_pool_manager.get_resource_pool(Role.RewardModel)
            wanted = reward.value_worker_config(self.config[reward.SECTION])
            worker = RayClassWithInitArgs(cls=ray.remote(Reward), config=wanted)
            pools[pool][str(Role.RewardModel)] = worker

    @property
    def asks_a_model(self) -> bool:
        return self.config.get(reward.SECTION) is not None

    def init_workers(self) -> None:
        super().init_workers()
        if self.asks_a_model:
            role = str(Role.RewardModel)
            # All groups of these processes know the methods of all roles.
            self.reward_wg = self.actor_rollout_wg.spawn({role})[role]
            self.reward_wg.reset()
            # From now on: verl would have started an inference server.
            self.use_rm = True

    def _compute_reward_colocate(self, batch: DataProto) -> DataProto:
        if not self.asks_a_model:
            return super()._compute_reward_colocate(batch)
        whole, padding = pad_dataproto_to_divisor(
            batch.select(meta_info_keys=[]), self._get_dp_size(self.reward_wg, "train")
        )
        made = tu.get(self.reward_wg.compute_rewards(reward.columns(whole)), "rewards")
        mask = batch.batch["response_mask"]
        scores = torch.zeros(mask.shape, dtype=torch.float32)
        scores[torch.arange(len(mask)), mask.sum(1) - 1] = made[: len(made) - padding]
        return DataProto.from_dict(tensors={"rm_scores": scores})

    def _start_profiling(self, do_profile: bool) -> None:
        super()._start_profiling(do_profile)
        if do_profile and self.asks_a_model:
            self.reward_wg.start_profile(profile_step=self.global_steps)

    def _stop_profiling(self, do_profile: bool, run_command: bool = False) -> None:
        super()._stop_profiling(do_profile, run_command)
        if do_profile and self.asks_a_model:
            self.reward_wg.stop_profile(run_command=run_command)
