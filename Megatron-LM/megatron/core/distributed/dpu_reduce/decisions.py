# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Decides the route of each bucket group of a model, and prints the routes. Rates are measured if
requested."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from . import advice, bytepslib, job, refusals, summed_later, translations
from .bucket_op import BucketOp, group_name, node_sums, wire_bytes, wire_of

if TYPE_CHECKING:
    from byteps.forecast import Kind
    from byteps.torch.routes import Decision, Measured, Sum

    from ...transformer.transformer_config import TransformerConfig
    from ..distributed_data_parallel_config import DistributedDataParallelConfig
    from ..param_and_grad_buffer import _ParamAndGradBucketGroup, _ParamAndGradBuffer


_Group = torch.distributed.ProcessGroup

_measurements: dict[tuple[object, ...], Measured] = {}
"""Measured rates by group and sum. Identical model chunks are measured only once."""


def measured(
    kind: str,
    group: _Group,
    groups: Sequence[_ParamAndGradBucketGroup],
    sums: Sequence[Sum],
    buffer: _ParamAndGradBuffer,
) -> Measured:
    """Measure the rates of the largest sum of a kind. All members of the group call this.

    Args:
        kind: ``dense`` or ``expert``.
        group: the data-parallel group.
        groups: bucket groups.
        sums: the sum of each bucket group.
        buffer: a buffer of that kind.

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
    _measurements[key] = bytepslib.routes.measure(what, job.joined().network, tries, group, like)
    return _measurements[key]


_UPDATED = "; the servers update the parameters"
_reported: set[str] = set()


def forget() -> None:
    """Forget measurements and printed tables. Both are then made anew."""
    _measurements.clear()
    _reported.clear()


def decide_all(
    config: DistributedDataParallelConfig,
    kind: str,
    group: torch.distributed.ProcessGroup,
    groups: Sequence[_ParamAndGradBucketGroup],
    buffers: Sequence[_ParamAndGradBuffer],
    *,
    measures: bool,
) -> dict[int, Decision]:
    """Return the decision for each bucket, by the bucket's id. Rank 0 prints the reasons.

    All members of the group call this and get the same result.

    Args:
        config: config of the DDP.
        kind: ``dense`` or ``expert``.
        group: the data-parallel group.
        groups: the DDP's bucket groups.
        buffers: buffers of these groups.
        measures: whether rates may be measured. Without measuring, every start decides the same.
    """
    if job.replicas() > 1:
        return _over_replicas(config, kind, group, groups)
    hosts = tuple(job.joined().hosts[rank] for rank in job.ranks_of(group))
    routes = bytepslib.routes
    requested = config.dpu_reduce_backend or routes.AUTO
    sums = [
        routes.Sum(
            hosts=hosts,
            gradient_bytes=sum(bucket.grad_data.nbytes for bucket in bucket_group.buckets),
            wire_bytes=sum(wire_bytes(bucket, config) for bucket in bucket_group.buckets),
            sharded=config.use_distributed_optimizer,
            instances=config.num_distributed_optimizer_instances,
            updated=summed_later.are_updated(bucket_group.buckets, config),
        )
        for bucket_group in groups
    ]
    network = job.joined().network
    summed = [pair for pair in zip(groups, sums, strict=True) if not pair[1].updated]
    if requested == routes.AUTO and measures and len(set(hosts)) > 1 and summed:
        groups_and_sums = [pair[0] for pair in summed], [pair[1] for pair in summed]
        network = measured(kind, group, *groups_and_sums, buffers[0]).applied(network)
    decisions: dict[int, Decision] = {}
    rows = []
    for bucket_group, what in zip(groups, sums, strict=True):
        decision = routes.decide(what, network, requested)
        rows.append((what, decision))
        decisions |= {id(bucket): decision for bucket in bucket_group.buckets}
    if torch.distributed.get_rank() == 0:
        for updated in (False, True):
            if some_rows := [row for row in rows if row[0].updated == updated]:
                print_once(advice.describe(kind, some_rows, network))
    return decisions


def _over_replicas(
    config: DistributedDataParallelConfig,
    kind: str,
    group: torch.distributed.ProcessGroup,
    groups: Sequence[_ParamAndGradBucketGroup],
) -> dict[int, Decision]:
    """Return the decisions for a job with replicas. They have no choice of routes, because they
    meet only at the servers."""
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
            f"dpu_reduce: replica {job.replica()} of {job.replicas()}: {kind} gradients that "
            f"replicas sum go {inside}through {servers} "
            f"{'server' if servers == 1 else 'servers'}, {sent:.1f} MB from each rank"
            f"{_UPDATED if config.dpu_optimizer else ''}"
        )
    return {id(bucket): decision for bucket in buckets}


def print_once(text: str) -> None:
    """Print a text unless it was printed before."""
    if text not in _reported:
        _reported.add(text)
        print(advice.as_lines(text), flush=True)


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
    """Print, on rank 0, the forecast gain for the first model chunk of this rank.

    Args:
        config: config of the DDP.
        model_config: config of its model.
        kinds: name, data-parallel group, bucket groups and buffers of each kind of gradients.
    """
    if torch.distributed.get_rank() != 0:
        return
    everybody = bytepslib.routes.per_host(job.joined().hosts)
    forecast_kinds: list[Kind] = []
    gradient_bytes, parameter_bytes, bf16 = 1, 1, True
    for name, group, groups, buffers in kinds:
        buckets = [bucket for bucket_group in groups for bucket in bucket_group.buckets]
        elements = sum(bucket.grad_data.numel() for bucket in buckets)
        if not elements:
            continue
        hosts = tuple(job.joined().hosts[rank] for rank in job.ranks_of(group))
        # Every rank is in one group of this kind, and all hosts are assumed to have equally many
        # ranks.
        count = everybody[hosts[0]] / bytepslib.routes.per_host(hosts)[hosts[0]]
        left = sum(
            parameter.numel()
            for bucket in buckets
            for parameter in bucket.params_list
            if summed_later.stays(parameter, config)
        )
        forecast_kinds.append(
            bytepslib.forecast.Kind(name=name, groups={hosts: count}, elements=elements, left=left)
        )
        # Nearly all elements have the same type. Otherwise the larger type decides.
        gradient_bytes = max([gradient_bytes, *(b.grad_dtype.itemsize for b in buffers)])
        parameter_bytes = max([parameter_bytes, *(b.param_dtype.itemsize for b in buffers)])
        bf16 = bf16 and not any(b.param_dtype in (torch.float16, torch.float32) for b in buffers)
    given = translations.given
    training = bytepslib.forecast.Training(
        kinds=tuple(forecast_kinds),
        gradient_bytes=gradient_bytes,
        parameter_bytes=parameter_bytes,
        sharded=config.use_distributed_optimizer or bool(given.instances),
        instances=given.instances or config.num_distributed_optimizer_instances,
        updated=config.dpu_optimizer,
        used=True,
        preset=given.preset,
        wire=config.dpu_reduce_wire_dtype,
        bf16=bf16,
        missing_overlaps=advice.missing_overlaps(config),
    )
    network = job.joined().network
    refused = refusals.why_servers_cannot_update(config) or refusals.why_servers_cannot_update(
        model_config
    )
    print_once(advice.brief(bytepslib.forecast.forecast(training, network, refused)))
