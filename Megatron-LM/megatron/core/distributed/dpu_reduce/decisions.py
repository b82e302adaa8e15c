# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""The route of each bucket group of a model, and the table that says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from . import bytepslib, job, matrices, replicas, table
from .bucket_op import wire_bytes
from .trials import measured

if TYPE_CHECKING:
    from byteps.torch.routes import Decision

    from ..distributed_data_parallel_config import DistributedDataParallelConfig
    from ..param_and_grad_buffer import _ParamAndGradBucketGroup, _ParamAndGradBuffer

_UPDATED = "; the servers update the parameters"
_told: set[str] = set()


def forget() -> None:
    """Tell tables again that were told before."""
    _told.clear()


def decide_all(
    config: DistributedDataParallelConfig,
    kind: str,
    group: torch.distributed.ProcessGroup,
    groups: Sequence[_ParamAndGradBucketGroup],
    buffers: Sequence[_ParamAndGradBuffer],
) -> dict[int, Decision]:
    """The decision for each bucket, by the bucket's id; rank 0 prints how it came about.

    All members of the group call this, and decide the same.

    Args:
        config: of the DDP.
        kind: ``dense`` or ``expert``.
        group: the data-parallel group.
        groups: bucket groups that it sums.
        buffers: that these are made of.
    """
    if replicas.count() > 1:
        return _over_replicas(config, kind, group, groups)
    hosts = tuple(job.joined().hosts[rank] for rank in job.ranks_of(group))
    routes = bytepslib.routes
    asked = config.dpu_reduce_route or routes.AUTO
    sums = [
        routes.Sum(
            hosts=hosts,
            gradient_bytes=sum(bucket.grad_data.nbytes for bucket in bucket_group.buckets),
            wire_bytes=sum(wire_bytes(bucket, config) for bucket in bucket_group.buckets),
            sharded=config.use_distributed_optimizer,
            instances=config.num_distributed_optimizer_instances,
            updated=matrices.are_updated(bucket_group.buckets, config),
        )
        for bucket_group in groups
    ]
    network = job.joined().network
    summed = [pair for pair in zip(groups, sums, strict=True) if not pair[1].updated]
    if asked == routes.AUTO and job.joined().measures and len(set(hosts)) > 1 and summed:
        some = [pair[0] for pair in summed], [pair[1] for pair in summed]
        network = measured(kind, group, *some, buffers[0]).applied(network)
    decisions: dict[int, Decision] = {}
    rows = []
    for bucket_group, what in zip(groups, sums, strict=True):
        decision = routes.decide(what, network, asked)
        rows.append((what, decision))
        decisions |= {id(bucket): decision for bucket in bucket_group.buckets}
    if torch.distributed.get_rank() == 0:
        for updated in (False, True):
            if some_rows := [row for row in rows if row[0].updated == updated]:
                print_once(table.describe(kind, some_rows, network))
    return decisions


def _over_replicas(
    config: DistributedDataParallelConfig,
    kind: str,
    group: torch.distributed.ProcessGroup,
    groups: Sequence[_ParamAndGradBucketGroup],
) -> dict[int, Decision]:
    """Replicas meet only at the servers: there is nothing to choose."""
    routes, ranks = bytepslib.routes, group.size()
    decision = routes.Decision(
        route=routes.NODE_FIRST if ranks > 1 else routes.FLAT,
        why="replicas meet only at the servers",
        loads={},
        seconds={},
    )
    buckets = [bucket for bucket_group in groups for bucket in bucket_group.buckets]
    if torch.distributed.get_rank() == 0:
        sent = sum(wire_bytes(bucket, config) for bucket in buckets) / ranks / 1e6
        servers = bytepslib.world.num_servers()
        inside = f"over {ranks} ranks by torch.distributed, then " if ranks > 1 else ""
        print_once(
            f"dpu_reduce: replica {replicas.number()} of {replicas.count()}: {kind} gradients are "
            f"summed {inside}over replicas by {servers} {'server' if servers == 1 else 'servers'}, "
            f"{sent:.1f} MB from each rank{_UPDATED if config.dpu_optimizer else ''}"
        )
    return {id(bucket): decision for bucket in buckets}


def print_once(text: str) -> None:
    """Print it, unless it was printed before."""
    if text not in _told:
        _told.add(text)
        print(table.as_lines(text), flush=True)
