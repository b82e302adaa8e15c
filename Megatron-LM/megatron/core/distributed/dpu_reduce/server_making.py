# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Makes the optimizer of ``--dpu-optimizer``, and with Muon that of the ranks next to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...optimizer import _get_param_groups
from ...optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from ...process_groups_config import ProcessGroupCollection
from .ranks_part import Part, RanksPart, whole_gathers
from .refusal import OF_MATRICES
from .refusals import validate_optimizer_config
from .server_optimizer import ServerOptimizer

if TYPE_CHECKING:
    from ...optimizer.optimizer_config import OptimizerConfig
    from ..distributed_data_parallel import DistributedDataParallel
    from ..distributed_data_parallel_config import DistributedDataParallelConfig


def make_server_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[DistributedDataParallel],
    config_overrides: Any,
    pg_collection: ProcessGroupCollection | None,
) -> MegatronOptimizer:
    """The optimizer of model chunks whose DDP has ``dpu_optimizer``.

    Args:
        config: what the update is.
        model_chunks: of this rank; their buckets are named.
        config_overrides: for some of the parameters, as Megatron has them.
        pg_collection: the process groups, or None for those of ``parallel_state``.

    Raises:
        ValueError: the config asks for what servers cannot do; the text names it.
        byteps.torch.BytePSError: a server refuses, or has too little memory.
    """
    validate_optimizer_config(config)
    ranks, parts = None, model_chunks
    if are_ranks_to_update(config, model_chunks[0].ddp_config):
        config = whole_gathers(config)
        ranks = RanksPart(config, model_chunks, config_overrides, pg_collection)
        parts = [Part(chunk, matrices=False) for chunk in model_chunks]
    # The same groups in the same order on every rank.
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
    """Ranks update matrices and servers the rest, in one step."""

    def __init__(self, ranks: RanksPart, served: ServerOptimizer) -> None:
        mine = ranks.optimizer
        # One that has cut its matrices over ranks is more than the optimizers in it.
        parts = mine.chained_optimizers if type(mine) is ChainedOptimizer else [mine]
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
    """Whether ranks keep the matrices' optimizer.

    Raises:
        ValueError: model and optimizer are not made for the same.
    """
    of_matrices = config.optimizer in OF_MATRICES
    if of_matrices == ddp_config.dpu_optimizer_matrices:
        wanted = not of_matrices
        raise ValueError(
            f"--dpu-optimizer: with --optimizer={config.optimizer} a model is wrapped with "
            f"dpu_optimizer_matrices={wanted} in its DistributedDataParallelConfig"
        )
    return of_matrices
