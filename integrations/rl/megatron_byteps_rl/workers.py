"""verl's workers, with generation in the processes that train."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from . import cpu, rollout


def checksum(engine: Any) -> str:
    """SHA-256 over this rank's parameters, by name."""
    digest = hashlib.sha256()
    for model in engine.module:
        for name, parameter in sorted(model.named_parameters()):
            data = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(name.encode())
            digest.update(data.numpy().tobytes())
    return digest.hexdigest()


class ActorRolloutRef(ActorRolloutRefWorker):
    """Actor, rollout and reference in one process.

    Generation takes all ranks as data-parallel ones: each has the whole model.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if cpu.is_wanted():
            cpu.prepare()
        rollout.register()
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses to ``prompt_ids``, and the log-probabilities that they were drawn with.

        Args:
            prompts: this rank's part; ``prompt_ids`` are lists of tokens.
                ``meta_info``: ``temperature``, and ``seed``, to which the rank is added.
        """
        made = self.rollout.generate(
            [list(tokens) for tokens in prompts.non_tensor_batch["prompt_ids"]],
            length=self.rollout.config.response_length,
            temperature=prompts.meta_info["temperature"],
            seed=prompts.meta_info["seed"] * self.world_size + self.rank,
        )
        mask = torch.cat([made.prompt_mask, made.response_mask], 1)
        return DataProto.from_dict(
            tensors={
                "prompts": made.prompts,
                "responses": made.responses,
                "response_mask": made.response_mask,
                "input_ids": torch.cat([made.prompts, made.responses], 1),
                "attention_mask": mask,
                "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
                "rollout_log_probs": made.log_probs,
            },
            # verl looks for pictures here.
            non_tensors={"multi_modal_inputs": np.array([{}] * len(mask), dtype=object)},
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checksum(self) -> str:
        return checksum(self.actor.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leave(self) -> None:
        """Leave the BytePS job, with every model of this process."""
        from megatron.core.distributed import dpu_reduce

        dpu_reduce.shutdown()


class Critic(TrainingWorker):
    """verl's critic."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if cpu.is_wanted():
            cpu.prepare()
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checksum(self) -> str:
        return checksum(self.engine)
