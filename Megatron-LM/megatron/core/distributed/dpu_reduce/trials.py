# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Sums of a scratch tensor by each route, as a bucket would be summed, to find which is fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from . import bytepslib, job
from .bucket_op import BucketOp, wire_of
from .naming import group_name
from .node_sums import node_sums

if TYPE_CHECKING:
    from byteps.torch.measure import Measured
    from byteps.torch.routes import Sum

    from ..param_and_grad_buffer import _ParamAndGradBucketGroup, _ParamAndGradBuffer

_Group = torch.distributed.ProcessGroup

_measurements: dict[tuple[object, ...], Measured] = {}
"""By group and by what is summed: model chunks that are alike are measured once."""


def forget() -> None:
    """Measure anew."""
    _measurements.clear()


def measured(
    kind: str,
    group: _Group,
    groups: Sequence[_ParamAndGradBucketGroup],
    sums: Sequence[Sum],
    buffer: _ParamAndGradBuffer,
) -> Measured:
    """The rates of the largest sum of a kind; all members of the group call this.

    Args:
        kind: ``dense`` or ``expert``.
        group: the data-parallel group.
        groups: bucket groups.
        sums: of these, one each.
        buffer: of that kind.

    Raises:
        byteps.torch.BytePSError: a push-pull failed; the text names the peer.
    """
    what, bucket_group = max(
        zip(sums, groups, strict=True), key=lambda pair: pair[0].gradient_bytes
    )
    like, ranks = bucket_group.buckets[0].grad_data, job.ranks_of(group)
    wire = wire_of(buffer.param_dtype, like.dtype, buffer.ddp_config)
    owners = job.ranks_of(buffer.data_parallel_group)
    key = (kind, ranks, owners, like.dtype, wire, what.sharded, what.gradient_bytes)
    if key in _measurements:
        return _measurements[key]

    routes = bytepslib.routes

    def sum_op(tensor: torch.Tensor, route: str) -> BucketOp:
        dtypes = f"{like.dtype}-{wire}".replace("torch.", "").replace(" ", "-")
        return BucketOp(
            name=f"dpu_reduce/measured/{kind}/{group_name(ranks)}/{dtypes}/{tensor.numel()}",
            group=ranks,
            owners=owners,
            placement=min(ranks),
            wire=wire,
            route=route,
        )

    def flat(tensor: torch.Tensor) -> None:
        op, bps = sum_op(tensor, routes.FLAT), bytepslib.byteps
        handle = bps.push_pull_async_inplace(
            tensor,
            average=False,
            name=op.name,
            placement=op.placement,
            group=op.group,
            pull=op.wanted(tensor.numel()) if what.sharded else None,
            wire_dtype=wire,
        )
        bps.synchronize(handle)

    def node_first(tensor: torch.Tensor) -> None:
        op = sum_op(tensor, routes.NODE_FIRST)
        whole, shards = node_sums(op, tensor, buffer, group)
        replace(shards or whole, placement=op.placement).start(tensor).wait()

    def collective(tensor: torch.Tensor) -> None:
        if not what.sharded:
            torch.distributed.all_reduce(tensor, group=group)
            return
        within = buffer.data_parallel_group
        shard = tensor.view(within.size(), -1)[within.rank()]
        torch.distributed.reduce_scatter_tensor(shard, tensor, group=within)
        if what.instances > 1:
            across = bucket_group.inter_distributed_optimizer_instance_group
            torch.distributed.all_reduce(shard, group=across)

    tries = {routes.FLAT: flat, routes.NODE_FIRST: node_first, routes.COLLECTIVE: collective}
    _measurements[key] = bytepslib.measure.measure(what, job.joined().network, tries, group, like)
    return _measurements[key]
