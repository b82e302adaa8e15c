"""verl's workers, with generation in the processes that train."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils import tensordict_utils as tu
from verl.utils.megatron_utils import load_megatron_model_to_gpu
from verl.utils.profiler import DistProfiler
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from . import engines, memory, reward, rollout


def checksum(engine: Any) -> str:
    """SHA-256 over this rank's parameters, by name."""
    if engine.is_param_offload_enabled:
        load_megatron_model_to_gpu(engine.module, load_grad=False)
    try:
        return _checksum(engine)
    finally:
        if engine.is_param_offload_enabled:
            engine.to("cpu", model=True, optimizer=False, grad=False)


def _checksum(engine: Any) -> str:
    digest = hashlib.sha256()
    for model in engine.module:
        for name, parameter in sorted(model.named_parameters()):
            # A copy: what NumPy has seen can be freed no more.
            data = parameter.detach().to("cpu", copy=True).contiguous().view(-1).view(torch.uint8)
            digest.update(name.encode())
            digest.update(data.numpy().tobytes())
    return digest.hexdigest()


class ActorRolloutRef(ActorRolloutRefWorker):
    """Actor, rollout and reference in one process."""

    PHASES: Mapping[str, str] = {
        "generate_sequences": "generation",
        "compute_log_prob": "log-probabilities",
        "compute_ref_log_prob": "reference",
        "update_actor": "actor update",
        "update_weights": "weights to the rollout",
    }
    """Methods whose peak memory is kept, and its names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if engines.are_wanted():
            engines.prepare()
        rollout.register()
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        mesh = self.rollout.device_mesh
        self._copy = mesh["dp"].get_local_rank()
        # Prompts are cut over the rollout's copies of the model, whatever the layout of training.
        first = mesh["infer_tp"].get_local_rank() == mesh["infer_pp"].get_local_rank() == 0
        self._register_dispatch_collect_info("rollout", dp_rank=self._copy, is_collect=first)
        if hasattr(self.rollout, "follow"):
            self.rollout.follow(self.actor.engine)
        self._watch_gradients()
        memory.watch(self, self.PHASES)

    def _watch_gradients(self) -> None:
        """Keep the time at which the last gradients were summed and the optimizer began."""
        step = self.actor.engine.optimizer_step
        self._gradients_at: float | None = None
        self._first_token_s: float | None = None

        def watched() -> Any:
            self._gradients_at = time.monotonic()
            return step()

        self.actor.engine.optimizer_step = watched

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    @DistProfiler.annotate(color="purple", role="rollout_generate")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses to ``prompt_ids``, and the log-probabilities that they were drawn with.

        Args:
            prompts: the part of this rank's copy of the model; ``prompt_ids`` are lists of tokens.
                ``meta_info``: ``temperature``, and ``seed``, from which each copy makes its own.
        """
        made = self.rollout.generate(
            [list(tokens) for tokens in prompts.non_tensor_batch["prompt_ids"]],
            length=self.rollout.config.response_length,
            temperature=prompts.meta_info["temperature"],
            seed=prompts.meta_info["seed"] * self.world_size + self._copy,
        )
        if self._gradients_at is not None:
            self._first_token_s = self.rollout.first_token_at - self._gradients_at
            self._gradients_at = None  # of later batches it says nothing
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
    def reshard_cost(self) -> dict[str, float] | None:
        """Of the last reshard on this rank; None where the rollout takes whole tensors."""
        cost = getattr(self.rollout, "cost", None)
        return None if cost is None else dataclasses.asdict(cost)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def first_token_s(self) -> float | None:
        """From the last summed gradients to the first token after them; None before any."""
        return self._first_token_s

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory_peaks(self) -> dict[str, int]:
        """Of all models of this process; see ``memory.peaks``."""
        return memory.peaks()

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

    PHASES: Mapping[str, str] = {"infer_batch": "values", "train_mini_batch": "critic update"}
    """Methods whose peak memory is kept, and its names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if engines.are_wanted():
            engines.prepare()
        super().__init__(*args, **kwargs)
        memory.watch(self, self.PHASES)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checksum(self) -> str:
        return checksum(self.engine)


class Reward(Critic):
    """A reward model: verl's critic without an optimizer."""

    PHASES: Mapping[str, str] = {"compute_rewards": "reward"}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    @DistProfiler.annotate(color="brown", role="reward_compute")
    def compute_rewards(self, data: TensorDict) -> TensorDict | None:
        """``rewards``, float32 [batch]; None on ranks that have no output of the model.

        Args:
            data: this rank's part of ``reward.columns``.
        """
        output = self.infer_batch(data)
        if output is None:
            return None
        return tu.get_tensordict({"rewards": reward.at_last_token(tu.get(output, "values"))})
