# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""One plan made when DDP is built: what is summed by which route, under which name, and why."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from . import bytepslib, job, table
from .measure import Measured, measure
from .naming import bucket_name, group_name, named
from .refusals import WIRE_DTYPES, validate_ddp_config
from .routes import AUTO, COLLECTIVE, FLAT, NODE_FIRST, Decision, Sum, decide

if TYPE_CHECKING:
    from byteps.torch.nodes import HostLayout, NodeSum

    from ..distributed_data_parallel import DistributedDataParallel
    from ..distributed_data_parallel_config import DistributedDataParallelConfig
    from ..param_and_grad_buffer import (
        _ParamAndGradBucket,
        _ParamAndGradBucketGroup,
        _ParamAndGradBuffer,
    )

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BucketOp:
    """How one bucket is summed; fixed when DDP is built.

    It holds no data pointer: gradient buffers may be freed and allocated again between steps.
    """

    name: str
    """Key of the operation: the same on every rank of the group, unique in the job."""
    group: tuple[int, ...]
    """Global ranks that sum, in the order of the process group: the whole data-parallel group."""
    owners: tuple[int, ...]
    """Global ranks among which the distributed optimizer cuts the bucket into equal shards, in
    this order: the members of this rank's optimizer instance, which is all of the group where
    there is one instance."""
    placement: int
    """Place of the bucket's first partition in the round robin over the servers."""
    wire_dtype: torch.dtype
    """Type in which the gradients travel; that of the bucket, unless another was asked for."""
    route: str
    """``collective``, ``flat`` or ``node-first``; the same for all buckets of a bucket group."""
    node_whole: NodeSum | None = None
    """Node first: the sum of which every rank gets all."""
    node_shards: NodeSum | None = None
    """Node first, with the distributed optimizer: the sum of which each rank gets its shard."""

    def wanted(self, elements: int) -> tuple[int, int]:
        """First and last plus one of the bucket's elements that this rank's optimizer owns."""
        shard = elements // len(self.owners)
        index = self.owners.index(torch.distributed.get_rank())
        return index * shard, (index + 1) * shard


_told: set[str] = set()


def forget() -> None:
    """Let go of everything that was planned."""
    job.forget()
    _told.clear()
    _measurements.clear()
    named.clear()


def register(ddp: DistributedDataParallel) -> None:
    """Give each bucket of a newly built DDP its :class:`BucketOp`.

    Starts BytePS too where ``megatron.training`` did not.

    Raises:
        ValueError: the config is not supported; the text says why.
    """
    validate_ddp_config(ddp.ddp_config)
    chunk = _chunk_index(ddp.module)
    job.initialize()
    decisions: dict[int, Decision] = {}
    for kind, group, groups, buffers in _kinds(ddp):
        if groups:
            decisions |= _decide(ddp.ddp_config, kind, group, groups, buffers)

    for kind, group, _, buffers in _kinds(ddp):
        if not buffers:
            continue
        model = named.next_model(kind, _ranks(group), chunk)
        alike: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
        for buffer in buffers:
            dtypes = (buffer.param_dtype, buffer.grad_dtype)
            _register_buffer(
                *(buffer, alike[dtypes], decisions),
                kind=kind,
                group=group,
                model=model,
                chunk=chunk,
            )
            alike[dtypes] += 1

    buckets = [bucket for *_, buffers in _kinds(ddp) for b in buffers for bucket in b.buckets]
    names = [bucket.dpu_reduce_op.name for bucket in buckets]
    if len(set(names)) != len(names):
        raise RuntimeError(f"two gradient buckets share a BytePS name: {sorted(names)}")
    if not ddp.ddp_config.dpu_optimizer:  # else the optimizer does, with what servers do
        _declare(buckets, ddp.ddp_config)
    through = [bucket for bucket in buckets if bucket.dpu_reduce_op.route != COLLECTIVE]
    spread = _spread(through)
    logger.info(
        "gradient sums: %d of %d buckets go through BytePS, chunk %d, %.1f MB from this rank; the "
        "%d servers get %.1f to %.1f MB each",
        *(len(through), len(names), chunk, sum(spread) / 1e6),
        *(len(spread), min(spread) / 1e6, max(spread) / 1e6),
    )


def _declare(buckets: Sequence[_ParamAndGradBucket], config: DistributedDataParallelConfig) -> None:
    """Tell the servers of all sums by one message to each, so that no first step waits for them."""
    bps, rank, declarations = bytepslib.byteps, torch.distributed.get_rank(), []
    average = config.average_in_collective
    for bucket in buckets:
        op: BucketOp = bucket.dpu_reduce_op
        grads = bucket.grad_data
        if op.route == COLLECTIVE or len(op.group) == 1 or grads.numel() == 0:
            continue
        # Only these are summed at every step. The whole of a bucket that the optimizer shards is
        # summed when somebody asks for it, and declares itself then.
        sums = op.node_shards or op.node_whole
        if sums is not None:
            declarations += sums.declarations(rank, grads.dtype, grads.device)
            continue
        declarations.append(
            bps.TensorDeclaration(
                name=op.name,
                dtype=grads.dtype,
                numel=grads.numel(),
                average=average,
                group=op.group,
                placement=op.placement,
                wire_dtype=op.wire_dtype,
                device=grads.device,
            )
        )
    if declarations:
        bps.declare(declarations)


_Group = torch.distributed.ProcessGroup


def _kinds(
    ddp: DistributedDataParallel,
) -> Iterable[
    tuple[str, _Group, Sequence[_ParamAndGradBucketGroup], Sequence[_ParamAndGradBuffer]]
]:
    yield "dense", ddp.dp_cp_group, ddp.bucket_groups, ddp.buffers
    yield (
        "expert",
        ddp.expt_dp_group,
        ddp.expert_parallel_bucket_groups,
        ddp.expert_parallel_buffers,
    )


def _decide(
    config: DistributedDataParallelConfig,
    kind: str,
    group: _Group,
    groups: Sequence[_ParamAndGradBucketGroup],
    buffers: Sequence[_ParamAndGradBuffer],
) -> dict[int, Decision]:
    """The decision for each bucket, by its id; tell on rank 0 how it came about."""
    hosts = tuple(job.joined().hosts[rank] for rank in _ranks(group))
    asked = config.dpu_reduce_route or AUTO
    sums = [
        Sum(
            hosts=hosts,
            gradient_bytes=sum(bucket.grad_data.nbytes for bucket in bucket_group.buckets),
            wire_bytes=sum(_sent_bytes(bucket, config) for bucket in bucket_group.buckets),
            sharded=config.use_distributed_optimizer,
            instances=config.num_distributed_optimizer_instances,
            updated=config.dpu_optimizer,
        )
        for bucket_group in groups
    ]
    network = job.joined().network
    if asked == AUTO and job.joined().measures and len(set(hosts)) > 1 and not config.dpu_optimizer:
        network = _measured(kind, group, groups, sums, buffers[0]).applied(network)
    decisions: dict[int, Decision] = {}
    rows = []
    for bucket_group, what in zip(groups, sums, strict=True):
        decision = decide(what, network, asked)
        rows.append((what, decision))
        decisions |= {id(bucket): decision for bucket in bucket_group.buckets}
    if torch.distributed.get_rank() == 0:
        text = table.describe(kind, rows, network)
        if text not in _told:
            _told.add(text)
            print(table.as_lines(text), flush=True)
    return decisions


_measurements: dict[tuple[object, ...], Measured] = {}
"""By group and by what is summed: model chunks that are alike are measured once."""


@dataclass(frozen=True, kw_only=True)
class _Scratch:
    """Stands in for a bucket whose sum is tried."""

    grad_data: torch.Tensor


def _measured(
    kind: str,
    group: _Group,
    groups: Sequence[_ParamAndGradBucketGroup],
    sums: Sequence[Sum],
    buffer: _ParamAndGradBuffer,
) -> Measured:
    """The rates of the largest sum of a kind; all members of the group call this."""
    config, ranks = buffer.ddp_config, _ranks(group)
    what, bucket_group = max(
        zip(sums, groups, strict=True), key=lambda pair: pair[0].gradient_bytes
    )
    like = bucket_group.buckets[0].grad_data
    wire_dtype = _wire_dtype(buffer.param_dtype, like.dtype, config)
    owners = _ranks(buffer.data_parallel_group)
    key = (kind, ranks, owners, like.dtype, wire_dtype, what.sharded, what.gradient_bytes)
    if key in _measurements:
        return _measurements[key]

    def sum_op(tensor: torch.Tensor, route: str) -> BucketOp:
        dtypes = f"{like.dtype}-{wire_dtype}".replace("torch.", "")
        return BucketOp(
            name=f"dpu_reduce/measured/{kind}/{group_name(ranks)}/{dtypes}/{tensor.numel()}",
            group=ranks,
            owners=owners,
            placement=min(ranks),
            wire_dtype=wire_dtype,
            route=route,
        )

    def flat(tensor: torch.Tensor) -> None:
        op, bps = sum_op(tensor, FLAT), bytepslib.byteps
        handle = bps.push_pull_async_inplace(
            tensor,
            average=False,
            name=op.name,
            placement=op.placement,
            group=op.group,
            pull=op.wanted(tensor.numel()) if what.sharded else None,
            wire_dtype=wire_dtype,
        )
        bps.synchronize(handle)

    def node_first(tensor: torch.Tensor) -> None:
        op = sum_op(tensor, NODE_FIRST)
        whole, shards = _node_sums(op, _Scratch(grad_data=tensor), buffer, group)
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

    tries = {FLAT: flat, NODE_FIRST: node_first, COLLECTIVE: collective}
    _measurements[key] = measure(what, job.joined().network, tries, group, like)
    return _measurements[key]


def _sent_bytes(bucket: _ParamAndGradBucket, config: DistributedDataParallelConfig) -> int:
    param_dtype = next(iter(bucket.params_list)).dtype
    wire_dtype = _wire_dtype(param_dtype, bucket.grad_data.dtype, config)
    return bucket.grad_data.numel() * wire_dtype.itemsize


def _spread(buckets: Sequence[_ParamAndGradBucket]) -> list[int]:
    """Bytes that this rank pushes to each server in one step, of these buckets."""
    bps, rank = bytepslib.byteps, torch.distributed.get_rank()
    total = [0] * len(bps.bytes_per_server(1, name="count"))
    for bucket in buckets:
        op: BucketOp = bucket.dpu_reduce_op
        sums = op.node_shards or op.node_whole
        if sums is None:
            nbytes = bucket.grad_data.numel() * op.wire_dtype.itemsize
            parts = [
                bps.bytes_per_server(nbytes, name=op.name, group=op.group, placement=op.placement)
            ]
        else:
            pushes = sums.pushes(rank, bucket.grad_data.element_size())
            parts = [push.bytes_per_server() for push in pushes]
        for part in parts:
            total = [a + b for a, b in zip(total, part, strict=True)]
    return total


def _wire_dtype(
    param_dtype: torch.dtype, grad_dtype: torch.dtype, ddp_config: DistributedDataParallelConfig
) -> torch.dtype:
    """The wire type that was asked for is for fp32: of a half type it would keep less. With the
    optimizer on the servers, parameters come down in it."""
    if ddp_config.dpu_reduce_wire_dtype is None or grad_dtype != torch.float32:
        return grad_dtype
    if ddp_config.dpu_optimizer and param_dtype == torch.float32:
        return grad_dtype
    return WIRE_DTYPES[ddp_config.dpu_reduce_wire_dtype]


def _ranks(group: _Group) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(group))


def _register_buffer(
    buffer: _ParamAndGradBuffer,
    index: int,
    decisions: dict[int, Decision],
    *,
    kind: str,
    group: _Group,
    model: int,
    chunk: int,
) -> None:
    ranks, owners = _ranks(group), _ranks(buffer.data_parallel_group)
    instances = buffer.ddp_config.num_distributed_optimizer_instances
    if not set(owners) <= set(ranks) or len(owners) * instances != len(ranks):
        raise RuntimeError(
            f"--use-dpu-reduce: the {kind} data-parallel group {ranks} is not {instances} "
            f"optimizer instance(s) of ranks {owners}"
        )
    wire_dtype = _wire_dtype(buffer.param_dtype, buffer.grad_dtype, buffer.ddp_config)
    for bucket in buffer.buckets:
        op = BucketOp(
            name=bucket_name(
                kind=kind,
                group=ranks,
                model=model,
                chunk=chunk,
                param_dtype=buffer.param_dtype,
                grad_dtype=buffer.grad_dtype,
                bucket_id=bucket.bucket_id,
                buffer=index,
            ),
            group=ranks,
            owners=owners,
            placement=0,
            wire_dtype=wire_dtype,
            route=decisions[id(bucket)].route,
        )
        bucket.dpu_reduce_op = _placed(op, bucket, buffer, group)


def _placed(
    op: BucketOp, bucket: _ParamAndGradBucket, buffer: _ParamAndGradBuffer, group: _Group
) -> BucketOp:
    """The operation with its place on the servers and, node first, its sums inside the host."""
    bps, elements = bytepslib.byteps, bucket.grad_data.numel()
    if op.route == COLLECTIVE or elements == 0:
        return op
    nbytes = elements * op.wire_dtype.itemsize
    if op.route == FLAT:
        partitions = bps.partition_count(nbytes)
        return replace(op, placement=named.next_placement(op.group, partitions))
    assert op.route == NODE_FIRST
    sums = _node_sums(op, bucket, buffer, group)
    pushes = sums[0].pushes(torch.distributed.get_rank(), bucket.grad_data.element_size())
    placement = named.next_placement(op.group, sum(push.partitions for push in pushes))
    whole, shards = (replace(one, placement=placement) if one else None for one in sums)
    return replace(op, placement=placement, node_whole=whole, node_shards=shards)


@functools.lru_cache(maxsize=16)
def _layout(group: tuple[int, ...], hosts: tuple[int, ...]) -> HostLayout:
    """How a group is spread over the hosts of all ranks."""
    return bytepslib.nodes.HostLayout.of(group, [str(hosts[rank]) for rank in group])


@functools.lru_cache(maxsize=16)
def _owned(layout: HostLayout, group: tuple[int, ...], shards: int) -> list[list[int]]:
    """For each host, the shard that each of its ranks owns."""
    places = {rank: place for place, rank in enumerate(group)}
    return [[places[rank] % shards for rank in members] for members in layout.hosts]


def _node_sums(
    op: BucketOp,
    bucket: _ParamAndGradBucket | _Scratch,
    buffer: _ParamAndGradBuffer,
    group: _Group,
) -> tuple[NodeSum, NodeSum | None]:
    node, cutting, rank = bytepslib.nodes, bytepslib.pieces, torch.distributed.get_rank()
    layout = _layout(op.group, job.joined().hosts)
    beside, elements = layout.beside(rank), bucket.grad_data.numel()
    count = node.piece_count(elements * op.wire_dtype.itemsize // len(beside))
    common = {
        "layout": layout,
        "node": node.groups.get(
            beside, bucket.grad_data.device, (buffer.data_parallel_group, group)
        ),
        "average": buffer.ddp_config.average_in_collective,
        "wire_dtype": op.wire_dtype,
    }
    whole = node.NodeSum(
        name=op.name,
        pieces=tuple(cutting.whole_pieces(elements, len(beside), count)),
        **common,
    )
    if not buffer.ddp_config.use_distributed_optimizer:
        return whole, None
    shards = len(op.owners)
    owned = _owned(layout, op.group, shards)
    mine = owned[layout.host_of(rank)][layout.local_index(rank)]
    if op.owners[mine] != rank:
        raise RuntimeError(
            f"--use-dpu-reduce: rank {rank} is not shard {mine} of the owners {op.owners} in the "
            f"data-parallel group {op.group}"
        )
    cut = cutting.shard_pieces(
        elements, owned, layout.host_of(rank), layout.local_index(rank), count
    )
    if cut is None:
        # Several instances on one host: its ranks own the same shards, and gather more than these.
        return whole, None
    return whole, node.NodeSum(name=f"{op.name}/shards", pieces=tuple(cut), **common)


def _chunk_index(module: torch.nn.Module) -> int:
    """Virtual pipeline stage of a model chunk, which mixed-precision wrappers may hide."""
    part: Any = module
    while True:
        stage = getattr(part, "vp_stage", None)
        if stage is not None:
            return int(stage)
        if not hasattr(part, "module"):
            return 0
        part = part.module
