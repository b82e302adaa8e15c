# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""What ranks update where servers update the rest: see :mod:`.matrices`."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...optimizer import _get_megatron_emerging_optimizer
from ...optimizer.clip_grads import clip_grad_by_total_norm_fp32
from ...optimizer.optimizer import MegatronOptimizer, _get_param_grad_norm_group
from .matrices import stays
from .server_norms import Norms

if TYPE_CHECKING:
    from ...optimizer.optimizer_config import OptimizerConfig
    from ..distributed_data_parallel import DistributedDataParallel


class Part:
    """A model chunk of which some parameters are seen, and everything else as it is."""

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
    """An optimizer's config without what DDP does not do here: gather parameters while the next
    forward pass runs."""
    config = copy.copy(config)
    config.overlap_param_gather = False
    return config


class RanksPart:
    """What the optimizer of the ranks does in a step of the servers' one."""

    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[DistributedDataParallel],
        config_overrides: Any,
        pg_collection: Any,
    ) -> None:
        """Makes Megatron's optimizer of the matrices of model chunks.

        Args:
            config: which, and what its updates are.
            model_chunks: of this rank.
            config_overrides: for some of the parameters, as Megatron has them.
            pg_collection: the process groups, or None for those of ``parallel_state``.
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
        """The norms of all gradients. All ranks of the job call this.

        Args:
            rest: of those that servers have.
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
        """Clip by these norms, as Megatron does, and update."""
        limit = self.config.clip_grad
        by_norm: dict[str | None, list[torch.nn.Parameter]] = {}
        for parameter in self.optimizer.get_parameters():
            by_norm.setdefault(_get_param_grad_norm_group(parameter), []).append(parameter)
        for name, parameters in by_norm.items():
            if limit > 0.0:
                norm = norms.main if name is None else norms.own[name]
                clip_grad_by_total_norm_fp32(parameters, max_norm=limit, total_norm=norm)
        self.optimizer.step_with_ready_grads()
