"""A job as overrides of verl's configuration: algorithm, layout, and how gradients are summed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import task
from .devices import ENVIRONMENTS

ALGORITHMS = {"grpo": "grpo", "ppo": "gae"}
"""Names, and verl's advantage estimators."""
ROLLOUTS = {
    "transformers": "rollout.TransformersRollout",
    "megatron": "megatron_rollout.MegatronRollout",
}
"""The rollouts of this package: ``actor_rollout_ref.rollout.name``, module and class."""
REWARDS = ("rule", "megatron")
"""What scores a response: the rule that checks sums, or a model in Megatron's workers."""
BYTEPS = {"use_dpu_reduce": "true"}
"""What a job of verl's sets to have its gradients summed by BytePS."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One job."""

    algorithm: str = "grpo"
    device: str = "cpu"
    """Of the ranks, as ``devices`` names it."""
    through_byteps: bool = True
    ranks: int = 2
    tensor: int = 1
    pipeline: int = 1
    rollout: str = "transformers"
    rollout_tensor: int = 1
    """Ranks that share a copy of the model in the rollout."""
    reward: str = "rule"
    reward_model: Path | None = None
    """Folder of the reward's model, which has the layout of training."""
    offload: bool = False
    """Parameters, their gradients, and optimizer state leave the device while nobody needs them."""
    profile: tuple[int, int] | None = None
    """First and last step that verl's profiler and BytePS's timeline record, counted from 1."""
    profile_ranks: tuple[int, ...] = (0,)
    """Of verl's profiler."""
    steps: int = 30
    prompts: int = 16
    """Of a step."""
    responses: int = 8
    """To each prompt."""
    updates: int = 2
    """Mini-batches of a step."""
    seed: int = 1
    model: Path
    """Folder of a Hugging Face model."""
    folder: Path
    """For samples."""

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"algorithm {self.algorithm!r} is not known; it can be {', '.join(ALGORITHMS)}"
            )
        if self.device not in ENVIRONMENTS:
            raise ValueError(
                f"device {self.device!r} is not known; it can be {', '.join(ENVIRONMENTS)}"
            )
        if self.rollout not in ROLLOUTS:
            raise ValueError(
                f"rollout {self.rollout!r} is not known; it can be {', '.join(ROLLOUTS)}"
            )
        if self.reward not in REWARDS:
            raise ValueError(f"reward {self.reward!r} is not known; it can be {', '.join(REWARDS)}")
        if (self.reward == "megatron") != (self.reward_model is not None):
            raise ValueError(
                f"reward {self.reward!r} with the model {self.reward_model}: the reward megatron "
                "needs a model, and the rule none"
            )
        if self.rollout_tensor != 1 and self.rollout != "megatron":
            raise ValueError(
                f"rollout_tensor {self.rollout_tensor} needs the rollout megatron; {self.rollout} "
                "has the whole model on each rank"
            )
        if self.profile is not None and not 1 <= self.profile[0] <= self.profile[1] <= self.steps:
            raise ValueError(
                f"steps {self.profile[0]} to {self.profile[1]} cannot be profiled: there are 1 to "
                f"{self.steps}"
            )
        if wrong := [rank for rank in self.profile_ranks if not 0 <= rank < self.ranks]:
            raise ValueError(f"rank {wrong[0]} cannot be profiled: there are 0 to {self.ranks - 1}")
        if self.ranks % self.rollout_tensor:
            raise ValueError(
                f"{self.ranks} ranks cannot be cut into copies of {self.rollout_tensor} for the "
                "rollout"
            )
        if self.ranks % (self.tensor * self.pipeline):
            raise ValueError(
                f"{self.ranks} ranks cannot be cut into tensor {self.tensor}, pipeline "
                f"{self.pipeline}"
            )
        if self.prompts % self.updates or self.prompts * self.responses % (
            self.updates * self.ranks
        ):
            raise ValueError(
                f"{self.responses} responses to each of {self.prompts} prompts cannot be shared by "
                f"{self.updates} updates of {self.ranks} ranks"
            )

    @property
    def profile_folder(self) -> Path:
        """Of verl's traces and BytePS's timelines."""
        return self.folder / "profile"

    def trace_environment(self) -> dict[str, str]:
        """What BytePS's timeline needs to record the same steps as verl's profiler."""
        if self.profile is None:
            return {}
        first, last = self.profile
        # A round of each sum is an update, and updates are counted from 0.
        return {
            "BYTEPS_TRACE_ON": "1",
            "BYTEPS_TRACE_START_STEP": str((first - 1) * self.updates),
            "BYTEPS_TRACE_END_STEP": str(last * self.updates - 1),
            "BYTEPS_TRACE_DIR": str(self.profile_folder),
        }

    def _profiler(self) -> dict[str, object]:
        if self.profile is None:
            return {}
        first, last = self.profile
        values: dict[str, object] = {
            "global_profiler.tool": "torch",
            "global_profiler.steps": _list(range(first, last + 1)),
            "global_profiler.profile_continuous_steps": True,
            "global_profiler.save_path": self.profile_folder,
        }
        for role in self._roles():
            values |= {
                f"{role}.profiler.enable": True,
                f"{role}.profiler.ranks": _list(self.profile_ranks),
                f"{role}.profiler.tool_config.torch.contents": (
                    "[cpu]" if self.device == "cpu" else "[cpu,cuda]"
                ),
            }
        return values

    def _roles(self) -> list[str]:
        """Sections of verl's configuration that describe a Megatron model."""
        roles = ["actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"]
        return roles if self.reward_model is None else [*roles, "reward_worker"]

    def _reward(self) -> dict[str, object]:
        if self.reward_model is None:
            return {}
        return {
            "+critic@reward_worker": "megatron_critic",
            "+model@reward_worker.model": "hf_model",
            "reward_worker.megatron.forward_only": True,
            "reward_worker.use_dynamic_bsz": True,
            "reward_worker.model.path": self.reward_model,
        }

    def overrides(self) -> list[str]:
        """For verl's ``ppo_trainer``, as its command line takes them."""
        copies = self.ranks // (self.tensor * self.pipeline)
        of_rank = self.prompts * self.responses // copies
        values: dict[str, object] = {
            "model_engine": "megatron",
            "algorithm.adv_estimator": ALGORITHMS[self.algorithm],
            # The reference: in GRPO the loss has its distance, in PPO the reward.
            "actor_rollout_ref.actor.use_kl_loss": self.algorithm == "grpo",
            "actor_rollout_ref.actor.kl_loss_coef": 0.005,
            "algorithm.use_kl_in_reward": self.algorithm == "ppo",
            "algorithm.kl_ctrl.kl_coef": 0.005,
            "data.train_batch_size": self.prompts,
            "data.max_prompt_length": task.PROMPT_TOKENS,
            "data.max_response_length": task.RESPONSE_TOKENS,
            "data.dataloader_num_workers": 0,
            "data.seed": self.seed,
            "actor_rollout_ref.model.path": self.model,
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.actor.ppo_mini_batch_size": self.prompts // self.updates,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": of_rank // self.updates,
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": of_rank,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": of_rank,
            "actor_rollout_ref.rollout.name": self.rollout,
            "actor_rollout_ref.rollout.n": self.responses,
            "actor_rollout_ref.rollout.seed": self.seed,
            "actor_rollout_ref.rollout.tensor_model_parallel_size": self.rollout_tensor,
            "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": (
                "megatron_byteps_rl.trainer.Generation"
            ),
            "critic.optim.lr": 3e-3,
            "critic.ppo_micro_batch_size_per_gpu": of_rank // self.updates,
            "critic.model.path": self.model,
            "reward.num_workers": 0,
            "reward.custom_reward_function.path": task.__file__,
            "reward.custom_reward_function.name": task.compute_score.__name__,
            "trainer.use_v1": False,
            "trainer.nnodes": 1,
            "trainer.n_gpus_per_node": self.ranks,
            "trainer.device": self.device,
            "trainer.logger": "[file]",
            "trainer.total_training_steps": self.steps,
            "trainer.total_epochs": self.steps,
            "trainer.save_freq": -1,
            "trainer.test_freq": self.steps,
            "trainer.resume_mode": "disable",
            # Before and after: drawn, as in training, since the most likely token says little.
            "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
            "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
            "trainer.validation_data_dir": self.folder / "samples",
            "trainer.balance_batch": False,
        }
        values |= self._reward()
        for role in self._roles():
            values |= {
                f"{role}.megatron.tensor_model_parallel_size": self.tensor,
                f"{role}.megatron.pipeline_model_parallel_size": self.pipeline,
                f"{role}.megatron.sequence_parallel": False,
                f"{role}.megatron.use_remove_padding": False,
            }
            if self.offload:
                values |= {
                    f"{role}.megatron.{what}_offload": True for what in ("param", "optimizer")
                }
        for owner in ("actor_rollout_ref", *self._roles()[2:]):
            values |= {f"{owner}.model.use_remove_padding": False}
        if self.through_byteps:
            # All ranks share this machine, where nothing would go to servers unless asked for.
            for role in ("actor_rollout_ref.actor", "critic"):
                config = f"+{role}.megatron.override_ddp_config"
                values |= {f"{config}.{name}": value for name, value in BYTEPS.items()}
                values |= {f"{config}.dpu_reduce_route": "flat"}
        return [f"{name}={_text(value)}" for name, value in (values | self._profiler()).items()]


def _list(values: Iterable[int]) -> str:
    return f"[{','.join(map(str, values))}]"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
