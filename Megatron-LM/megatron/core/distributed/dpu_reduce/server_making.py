# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Creates the optimizer of ``--dpu-optimizer``. With Muon it also creates the ranks' optimizer.

:mod:`.summed_later` decides which parameters ranks update.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...optimizer import _get_megatron_emerging_optimizer, _get_param_groups
from ...optimizer.clip_grads import clip_grad_by_total_norm_fp32
from ...optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from ...process_groups_config import ProcessGroupCollection
from .refusal import OF_MATRICES
from .refusals import validate_optimizer_config
from .server_buckets import GRAD_NORM_GROUP_ATTR, Norms
from .server_optimizer import ServerOptimizer
from .summed_later import stays

if TYPE_CHECKING:
    from ...optimizer.optimizer_config import OptimizerConfig
    from ..distributed_data_parallel import DistributedDataParallel
    from ..distributed_data_parallel_config import DistributedDataParallelConfig


class Part:
    """View of a model chunk with only a part of its parameters. All other attributes are those of
    the chunk."""

    def __init__(self, chunk: DistributedDataParallel, *, matrices: bool) -> None:
        self._chunk, self._matrices = chunk, matrices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        config = self._chunk.ddp_config
        for name, parameter in self._chunk.named_parameters():
            if stays(parameter, config) == self._matrices:
                yield name, parameter

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())


def whole_gathers(config: OptimizerConfig) -> OptimizerConfig:
    """Return a copy of an optimizer's config without parameter gathers during the forward pass,
    because DDP does not make them here."""
    config = copy.copy(config)
    config.overlap_param_gather = False
    return config


class RanksPart:
    """Part of a step of the server optimizer that ranks make."""

    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[DistributedDataParallel],
        config_overrides: Any,
        pg_collection: Any,
    ) -> None:
        """Create Megatron's optimizer for the matrices of model chunks.

        Args:
            config: type of the optimizer and its options.
            model_chunks: model chunks of this rank.
            config_overrides: Megatron's overrides of options for a part of the parameters.
            pg_collection: the process groups; None: the process groups of ``parallel_state``.
        """
        parts: Any = [Part(chunk, matrices=True) for chunk in model_chunks]
        self.config = config
        self.optimizer: MegatronOptimizer = _get_megatron_emerging_optimizer(
            config=config,
            model_chunks=parts,
            config_overrides=dict(config_overrides or {}),
            pg_collection=pg_collection,
        )

    def norms(self, rest: Norms) -> Norms:
        """Return the norms of all gradients. All ranks of the job call this.

        Args:
            rest: norms of the servers' gradients.
        """
        if self.optimizer.prepare_grads():
            return Norms(main=math.inf, own=rest.own, zeros=rest.zeros)
        own = dict(rest.own)
        if self.config.clip_grad > 0.0:
            own = {name: math.hypot(norm, self._own_norm(name)) for name, norm in own.items()}
        main = math.hypot(rest.main, self.optimizer.get_grad_norm() or 0.0)
        zeros = int(self.optimizer.count_zeros()) if self.config.log_num_zeros_in_grad else 0
        return Norms(main=main, own=own, zeros=rest.zeros + zeros)

    def _own_norm(self, name: str) -> float:
        if not self.optimizer.has_grad_norm_group(name):
            return 0.0
        return float(self.optimizer._get_grad_norm_for_group(name) or 0.0)

    def update(self, norms: Norms) -> None:
        """Clip by these norms as Megatron does, then update."""
        limit = self.config.clip_grad
        by_norm: dict[str | None, list[torch.nn.Parameter]] = {}
        for parameter in self.optimizer.get_parameters():
            name = getattr(parameter, GRAD_NORM_GROUP_ATTR, None)
            by_norm.setdefault(name, []).append(parameter)
        for name, parameters in by_norm.items():
            if limit > 0.0:
                norm = norms.main if name is None else norms.own[name]
                clip_grad_by_total_norm_fp32(parameters, max_norm=limit, total_norm=norm)
        self.optimizer.step_with_ready_grads()


def make_server_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[DistributedDataParallel],
    config_overrides: Any,
    pg_collection: ProcessGroupCollection | None,
) -> MegatronOptimizer:
    """Create the optimizer of model chunks whose DDP has ``dpu_optimizer``.

    Args:
        config: options of the update.
        model_chunks: model chunks of this rank, already planned.
        config_overrides: Megatron's overrides of options for a part of the parameters.
        pg_collection: the process groups, or None for those of ``parallel_state``.

    Raises:
        ValueError: servers do not support an option; the text names it.
        byteps.torch.BytePSError: a server refuses, or has too little memory.
    """
    validate_optimizer_config(config)
    ranks, parts = None, model_chunks
    if are_ranks_to_update(config, model_chunks[0].ddp_config):
        config = whole_gathers(config)
        ranks = RanksPart(config, model_chunks, config_overrides, pg_collection)
        parts = [Part(chunk, matrices=False) for chunk in model_chunks]
    # Every rank must have the same groups in the same order.
    param_groups = _get_param_groups(parts, config, config_overrides)
    groups = ProcessGroupCollection.setup_process_groups_for_optimizer(
        pg_collection, model_chunks, False
    )
    has_experts = any(group["is_expert_parallel"] for group in param_groups)
    if pg_collection is None or not hasattr(pg_collection, "tp"):
        pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    served = ServerOptimizer(
        config,
        model_chunks,
        param_groups,
        dense_group=groups["mp_group"],
        expert_group=groups["expt_tp_pp_with_egtp_remat_group"] if has_experts else None,
        tp_group=pg_collection.tp,
        expert_tp_group=getattr(pg_collection, "expt_tp", pg_collection.tp),
        pp_group=pg_collection.pp,
        ranks=ranks,
    )
    return served if ranks is None else RanksAndServers(ranks, served)


class RanksAndServers(ChainedOptimizer):
    """Optimizer in which ranks update matrices and servers the rest, in the same step."""

    def __init__(self, ranks: RanksPart, served: ServerOptimizer) -> None:
        rank_optimizer = ranks.optimizer
        # A subclass of ChainedOptimizer divides its matrices over ranks, so it must stay whole.
        parts = (
            rank_optimizer.chained_optimizers
            if type(rank_optimizer) is ChainedOptimizer
            else [rank_optimizer]
        )
        super().__init__([*parts, served])
        self._served = served

    def step(self) -> tuple[bool, float | None, int | None]:
        """See :meth:`ServerOptimizer.step`."""
        result = self._served.step()
        self.grad_norms_by_group = self._served.grad_norms_by_group
        return result

    def get_loss_scale(self) -> torch.Tensor:
        return self._served.get_loss_scale()

    def prepare_grads(self) -> bool:
        return self._served.prepare_grads()

    def step_with_ready_grads(self) -> bool:
        return self._served.step_with_ready_grads()


def are_ranks_to_update(config: OptimizerConfig, ddp_config: DistributedDataParallelConfig) -> bool:
    """Return whether ranks keep the optimizer of matrices.

    Raises:
        ValueError: model and optimizer have different settings for matrices.
    """
    of_matrices = config.optimizer in OF_MATRICES
    if of_matrices == ddp_config.dpu_optimizer_matrices:
        wanted = not of_matrices
        raise ValueError(
            f"--dpu-optimizer with --optimizer={config.optimizer} needs "
            f"dpu_optimizer_matrices={wanted} in the model's DistributedDataParallelConfig"
        )
    return of_matrices
