"""The reward as a Megatron model: another role of verl's, next to actor, critic and reference.

Its configuration is a critic's, under the name ``reward_worker``. The model has a head of one
number, ``lm_head.weight`` [1, hidden], and its value at the last token of a response is the reward.
It has no optimizer and no gradients, so nothing of it is summed.
"""

from __future__ import annotations

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.utils.padding import left_right_2_no_padding

SECTION = "reward_worker"
"""Of verl's configuration: ``+critic@reward_worker=megatron_critic`` and
``+model@reward_worker.model=hf_model`` make it."""
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_SEEN = (
    "prompts",
    "responses",
    "input_ids",
    "attention_mask",
    "position_ids",
    "response_mask",
)
"""What of a batch the reward's model is given."""


def value_worker_config(section: DictConfig) -> TrainingWorkerConfig:
    """What verl's worker for values is made with, from the section of a critic or a reward."""
    made = omega_conf_to_dataclass(section)
    made.engine.infer_max_token_len_per_gpu = made.ppo_infer_max_token_len_per_gpu
    made.engine.max_token_len_per_gpu = made.ppo_max_token_len_per_gpu
    return TrainingWorkerConfig(
        model_type="value_model",
        model_config=made.model,
        engine_config=made.engine,
        optimizer_config=made.optim,
        checkpoint_config=made.checkpoint,
        profiler_config=omega_conf_to_dataclass(section.profiler),
    )


def check(config: DictConfig) -> None:
    """Refuse a reward's worker that cannot be.

    Raises:
        ValueError: it would train, is not the only model, or has another layout than the actor.
    """
    section = config[SECTION]
    if not section.megatron.forward_only:
        raise ValueError(
            f"{SECTION}.megatron.forward_only is false: the reward's model is not trained here; "
            "set it to true"
        )
    if config.reward.reward_model.enable:
        raise ValueError(
            f"{SECTION} and reward.reward_model.enable are two models for one reward; take one away"
        )
    actor = config.actor_rollout_ref.actor.megatron
    for name in _LAYOUT:
        if section.megatron[name] != actor[name]:
            raise ValueError(
                f"{SECTION}.megatron.{name}={section.megatron[name]}, and the actor has "
                f"{actor[name]}: verl's models of one process share Megatron's groups"
            )


def at_last_token(values: torch.Tensor) -> torch.Tensor:
    """Float [batch]: of the last token of each sequence, in a nested tensor [batch, tokens]."""
    # torch declares nothing that nested tensors alone have.
    ends = values.offsets()[1:]  # type: ignore[attr-defined]
    return values.values()[ends - 1].float()


def columns(batch: DataProto, *, compute_loss: bool = False) -> TensorDict:
    """A padded batch as verl's engines take it, for values."""
    data = left_right_2_no_padding(
        batch.select(
            batch_keys=_SEEN, non_tensor_batch_keys=["multi_modal_inputs"], meta_info_keys=[]
        ).to_tensordict()
    )
    tu.assign_non_tensor(data, compute_loss=compute_loss)
    return data
