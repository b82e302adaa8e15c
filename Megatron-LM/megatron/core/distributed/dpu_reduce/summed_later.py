# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Parameters that get separate buffers if servers keep the optimizer.

**Matrices.** Optimizers like Muon update matrices by a rule of their own, and all other parameters
by AdamW. Servers only support AdamW, so matrices stay on the ranks: their gradients are summed as
with ``--use-dpu-reduce`` alone, and Megatron's optimizer updates them. Servers update the rest.
Both parts are clipped by a common norm, and skip the same steps.

**Gradients that Megatron changes after the backward pass.** ``finalize_model_grads`` sums gradients
over tensor-parallel ranks (norms, with sequence parallelism) or pipeline stages (embeddings). A
bucket with such a gradient cannot be sent during the backward pass, only in the optimizer's step.
Few parameters have such gradients, but without separate buffers most buckets would have such a
parameter. Parameters that are clipped by a norm of their own get separate buffers as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ...transformer.transformer_config import TransformerConfig
    from ..distributed_data_parallel import DistributedDataParallel
    from ..distributed_data_parallel_config import DistributedDataParallelConfig
    from ..param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBucketGroup


def stays(parameter: torch.Tensor, config: DistributedDataParallelConfig) -> bool:
    """Return whether ranks update the parameter although servers keep the optimizer of others."""
    if config.dpu_optimizer_matrices:
        return False
    from ...optimizer.emerging_optimizers import _is_nonlinear_or_embedding

    return not _is_nonlinear_or_embedding(parameter)


def are_updated(
    buckets: Sequence[_ParamAndGradBucket], config: DistributedDataParallelConfig
) -> bool:
    """Return whether servers update the parameters of buckets. They update all of these parameters,
    or none."""
    if not config.dpu_optimizer:
        return False
    first = next((p for bucket in buckets for p in bucket.params_list), None)
    return first is None or not stays(first, config)


def part_groups(ddp: DistributedDataParallel) -> None:
    """Split bucket groups of a new DDP so that each has only matrices, or none. (A chunk without
    bucketing has all its buckets in one group.)"""
    config = ddp.ddp_config
    if not config.dpu_optimizer or config.dpu_optimizer_matrices:
        return
    for name in ("bucket_groups", "expert_parallel_bucket_groups"):
        parted: list[_ParamAndGradBucketGroup] = []
        for group in getattr(ddp, name):
            kinds: dict[bool, list[_ParamAndGradBucket]] = {}
            for bucket in group.buckets:
                kinds.setdefault(are_updated([bucket], config), []).append(bucket)
            if len(kinds) == 1:
                parted.append(group)
                continue
            members = group.data_parallel_group
            parted += [
                type(group)(buckets, config, members, members.size()) for buckets in kinds.values()
            ]
        setattr(ddp, name, parted)


_Group = torch.distributed.ProcessGroup
Buffers = Mapping[Any, tuple[list[torch.nn.Parameter], list[int]]]
"""Parameters of each buffer, with the indices that Megatron gave them."""


@dataclass(frozen=True, kw_only=True)
class _KeyOfPart:
    """Key of a separate buffer. It is like Megatron's BufferKey, but equal to none of them."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    is_expert_parallel: bool
    waits: bool
    """Whether Megatron changes the buffer's gradients after the backward pass."""
    norm_group: str | None
    """Name of the norm by which the buffer's gradients are clipped; None: the main norm."""
    stays: bool
    """Whether ranks update the buffer's parameters."""


class SummedLater:
    """Tells whether Megatron's finalize_model_grads changes a gradient after the backward pass.
    That function sums some gradients over tensor- or pipeline-parallel ranks, or scales all of
    them.

    This class repeats decisions of that function, which does not expose them. A test reads the
    function's code, and fails if it uses a property that this class does not use.
    """

    def __init__(
        self, config: TransformerConfig, tp_group: _Group, pp_group: _Group | Sequence[_Group]
    ) -> None:
        self._config = config
        self._tensor_parallel = tp_group.size() > 1
        pipelines = pp_group if isinstance(pp_group, Sequence) else [pp_group]
        self._pipeline_parallel = any(group.size() > 1 for group in pipelines)

    @property
    def are_all(self) -> bool:
        """Return whether all gradients change: because they are scaled by the number of tokens, or
        summed over ranks that hold shards of weights."""
        shards = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
        return bool(self._config.calculate_per_token_loss) or any(
            getattr(self._config, name, 1) > 1 for name in shards
        )

    def __call__(self, parameter: torch.Tensor, name: str) -> bool:
        if self.are_all:
            return True
        if self._tensor_parallel and (
            getattr(parameter, "sequence_parallel", False)
            or getattr(parameter, "average_gradients_across_tp_domain", False)
            or "q_layernorm" in name
            or "k_layernorm" in name
        ):
            return True
        # Pipeline stages may share embeddings. Only the model knows that.
        return self._pipeline_parallel and (
            "embedding" in name
            or "output_layer" in name
            or getattr(parameter, "pipeline_parallel", False)
            or getattr(parameter, "flextron_router_pp_sync", False)
        )


def separate_buffers(
    ddp: DistributedDataParallel,
    buffers: Buffers,
    names: Mapping[torch.nn.Parameter, str],
    config: TransformerConfig,
) -> Buffers:
    """Return the buffers of a new DDP, with separate buffers for gradients that are summed later or
    clipped by a norm of their own, and for parameters that ranks update.

    Gradients that are summed later get separate buffers only if other gradients can then be sent
    earlier: with ``overlap_grad_reduce``, and if not all gradients are summed later.

    Args:
        ddp: the DDP, with its config and process groups.
        buffers: Megatron's buffers, by Megatron's key.
        names: names of all parameters of the model.
        config: config of the model.
    """
    # The import is here, because the optimizers import this package.
    from .server_buckets import GRAD_NORM_GROUP_ATTR

    later = SummedLater(config, ddp.tp_group, ddp.pp_group)
    overlaps = ddp.ddp_config.overlap_grad_reduce and not later.are_all

    def kind_of(parameter: torch.nn.Parameter) -> tuple[bool, str | None, bool]:
        if stays(parameter, ddp.ddp_config):
            return False, None, True
        waits = overlaps and later(parameter, names[parameter])
        return waits, getattr(parameter, GRAD_NORM_GROUP_ATTR, None), False

    cut: dict[Any, tuple[list[torch.nn.Parameter], list[int]]] = {}
    for key, (parameters, indices) in buffers.items():
        kinds = {parameter: kind_of(parameter) for parameter in parameters}
        ordered = sorted(set(kinds.values()), key=lambda kind: (kind[0], kind[1] or "", kind[2]))
        for number, kind in enumerate(ordered):
            chosen = [
                pair for pair in zip(parameters, indices, strict=True) if kinds[pair[0]] == kind
            ]
            part = key if number == 0 else _key_of_part(key, *kind)
            cut[part] = ([p for p, _ in chosen], [index for _, index in chosen])
    return cut


def _key_of_part(key: Any, waits: bool, norm_group: str | None, stays: bool) -> _KeyOfPart:
    return _KeyOfPart(
        param_dtype=key.param_dtype,
        grad_dtype=key.grad_dtype,
        is_expert_parallel=key.is_expert_parallel,
        waits=waits,
        norm_group=norm_group,
        stays=stays,
    )
