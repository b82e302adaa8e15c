# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Optimizers of matrices, as Muon, with ``--dpu-optimizer``.

Such an optimizer updates matrices by a rule of its own, and leaves all other parameters to AdamW.
Servers know AdamW. So matrices stay on the ranks: their gradients are summed as with
``--use-dpu-reduce`` alone, in buckets of their own, and Megatron's optimizer updates them. Servers
update the rest. Both are clipped by one norm, and skip the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..distributed_data_parallel import DistributedDataParallel
    from ..distributed_data_parallel_config import DistributedDataParallelConfig
    from ..param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBucketGroup


def stays(parameter: torch.Tensor, config: DistributedDataParallelConfig) -> bool:
    """Whether ranks update the parameter, where servers keep the optimizer of the others."""
    if config.dpu_optimizer_matrices:
        return False
    from ...optimizer.emerging_optimizers import _is_nonlinear_or_embedding

    return not _is_nonlinear_or_embedding(parameter)


def are_updated(
    buckets: Sequence[_ParamAndGradBucket], config: DistributedDataParallelConfig
) -> bool:
    """Whether servers update the parameters of buckets, of which all or none stay on the ranks."""
    if not config.dpu_optimizer:
        return False
    first = next((p for bucket in buckets for p in bucket.params_list), None)
    return first is None or not stays(first, config)


def part_groups(ddp: DistributedDataParallel) -> None:
    """Bucket groups of a DDP that is being built hold matrices alone or none: a chunk without
    bucketing has all of its buckets in one group."""
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
