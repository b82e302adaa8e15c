# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""What a job that starts is told of the flags that it could use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from . import bytepslib, decisions, job, matrices, refusals, table
from .advice import Kind, Training, advise, wire_bytes

if TYPE_CHECKING:
    from ...transformer.transformer_config import TransformerConfig
    from ..distributed_data_parallel_config import DistributedDataParallelConfig
    from ..param_and_grad_buffer import _ParamAndGradBucketGroup, _ParamAndGradBuffer

_Kinds = Iterable[
    tuple[
        str,
        torch.distributed.ProcessGroup,
        Sequence["_ParamAndGradBucketGroup"],
        Sequence["_ParamAndGradBuffer"],
    ]
]


def tell(
    config: DistributedDataParallelConfig, model_config: TransformerConfig, kinds: _Kinds
) -> None:
    """Rank 0 prints what its first model chunk would gain.

    Args:
        config: of the DDP.
        model_config: of the model in it.
        kinds: the name of each kind of gradients, its data-parallel group, its bucket groups and
            buffers.
    """
    if torch.distributed.get_rank() != 0:
        return
    everybody = bytepslib.routes.per_host(job.joined().hosts)
    found, gradient_bytes, parameter_bytes = [], 1, 1
    for name, group, groups, buffers in kinds:
        buckets = [bucket for bucket_group in groups for bucket in bucket_group.buckets]
        elements = sum(bucket.grad_data.numel() for bucket in buckets)
        if not elements:
            continue
        hosts = tuple(job.joined().hosts[rank] for rank in job.ranks_of(group))
        # Every rank is in one such group, and hosts look alike.
        count = everybody[hosts[0]] / bytepslib.routes.per_host(hosts)[hosts[0]]
        left = sum(
            parameter.numel()
            for bucket in buckets
            for parameter in bucket.params_list
            if matrices.stays(parameter, config)
        )
        found.append(Kind(name=name, groups={hosts: count}, elements=elements, left=left))
        # Nearly all elements have one type; where they have not, the larger one decides.
        gradient_bytes = max([gradient_bytes, *(b.grad_dtype.itemsize for b in buffers)])
        parameter_bytes = max([parameter_bytes, *(b.param_dtype.itemsize for b in buffers)])
    training = Training(
        kinds=tuple(found),
        gradient_bytes=gradient_bytes,
        parameter_bytes=parameter_bytes,
        sharded=config.use_distributed_optimizer,
        instances=config.num_distributed_optimizer_instances,
        updated=config.dpu_optimizer,
        used=True,
        wire_bytes=wire_bytes(config.dpu_reduce_wire_dtype),
    )
    network = job.joined().network
    refused = refusals.why_servers_cannot_update(config) or refusals.why_servers_cannot_update(
        model_config
    )
    decisions.print_once(table.brief(training, advise(training, network, refused), network))
