# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Plans a DDP when it is built: gives each bucket its operation, and declares the bucket to the
servers."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from . import advice, bytepslib, decisions, job, replica_refusals, summed_later
from .bucket_op import BucketOp, bucket_name, kept_of, named, node_sums, wire_of
from .refusal import FEW_BITS
from .refusals import validate_ddp_config, validate_model_config
from .sums import goes_through_servers

if TYPE_CHECKING:
    from byteps.torch.routes import Decision

    from ...transformer.transformer_config import TransformerConfig
    from ..distributed_data_parallel import DistributedDataParallel
    from ..distributed_data_parallel_config import DistributedDataParallelConfig
    from ..param_and_grad_buffer import (
        _ParamAndGradBucket,
        _ParamAndGradBucketGroup,
        _ParamAndGradBuffer,
    )
    from .bucket_op import BucketOp


def declare(buckets: Sequence[_ParamAndGradBucket], config: DistributedDataParallelConfig) -> None:
    """Declare all sums with one message per server, so that the first step does not have to.

    Raises:
        byteps.torch.BytePSError: a server does not answer, or members disagree about a bucket.
    """
    bps, rank, declarations = bytepslib.byteps, job.rank(), []
    average = config.average_in_collective
    for bucket in buckets:
        op: BucketOp = bucket.dpu_reduce_op
        grads = bucket.grad_data
        if op.route == bytepslib.routes.COLLECTIVE or len(op.group) == 1 or grads.numel() == 0:
            continue
        # Only sums of every step are declared here. A bucket that the optimizer shards is rarely
        # summed as a whole, so the first such sum declares it.
        if op.bf16_part is not None:
            declarations.append(op.bf16_part.declaration(op, grads, average=average))
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
                wire_dtype=op.wire,
                device=grads.device,
                in_order=op.in_order,
            )
        )
    if declarations:
        bps.declare(declarations)


def bytes_per_server(buckets: Sequence[_ParamAndGradBucket]) -> list[int]:
    """Return the bytes of these buckets that this rank pushes to each server in a step."""
    bps, rank = bytepslib.byteps, job.rank()
    total = [0] * bytepslib.world.num_servers()
    for bucket in buckets:
        op: BucketOp = bucket.dpu_reduce_op
        sums = op.node_shards or op.node_whole
        if sums is None:
            parts = [
                bps.bytes_per_server(
                    op.wire.nbytes(bucket.grad_data.numel()),
                    name=op.name,
                    group=op.group,
                    placement=op.placement,
                    wire_dtype=op.wire,
                )
            ]
        else:
            pushes = sums.pushes(rank, bucket.grad_data.element_size())
            parts = [push.bytes_per_server() for push in pushes]
        if op.bf16_part is not None:
            parts.append(op.bf16_part.bytes_per_server(op))
        for part in parts:
            total = [a + b for a, b in zip(total, part, strict=True)]
    return total


logger = logging.getLogger(__name__)

_Group = torch.distributed.ProcessGroup

_planned: list[weakref.ref[DistributedDataParallel]] = []
"""Weak references to all planned models."""


def forget() -> None:
    """Drop all plans."""
    for module in (job, decisions):
        module.forget()
    named.clear()
    _planned.clear()


def all_buckets() -> Iterator[tuple[_ParamAndGradBucket, DistributedDataParallelConfig]]:
    """Yield the buckets of all living models, with their operations, in the order of planning."""
    for ddp in filter(None, [reference() for reference in _planned]):
        for *_, buffers in _kinds(ddp):
            for buffer in buffers:
                for bucket in buffer.buckets:
                    if bucket.grad_data.numel() > 0:
                        yield bucket, ddp.ddp_config


def register(ddp: DistributedDataParallel) -> None:
    """Give each bucket of a newly built DDP its :class:`BucketOp`.

    Also starts BytePS if ``megatron.training`` did not.

    Raises:
        ValueError: the config is not supported, or there are several replicas but Megatron's
            arguments ignore them; the text says why.
    """
    validate_ddp_config(ddp.ddp_config)
    validate_model_config(ddp.config, ddp.ddp_config)
    chunk = _chunk_index(ddp.module)
    summed_later.part_groups(ddp)
    job.initialize()
    job.demand_arguments()
    if job.replicas() > 1:
        replica_refusals.check_config(ddp.ddp_config)
    chosen: dict[int, Decision] = {}
    for kind, group, groups, buffers in _kinds(ddp):
        if groups:
            measures = job.joined().measures and not ddp.config.deterministic_mode
            chosen |= decisions.decide_all(
                ddp.ddp_config, kind, group, groups, buffers, measures=measures
            )
    if chunk == 0 and job.replicas() == 1:
        decisions.tell(ddp.ddp_config, ddp.config, _kinds(ddp))

    parameters: dict[torch.nn.Parameter, str] = {}
    if ddp.ddp_config.dpu_reduce_wire_dtype in FEW_BITS:
        parameters = {parameter: name for name, parameter in ddp.module.named_parameters()}
    for kind, group, _, buffers in _kinds(ddp):
        if not buffers:
            continue
        model = named.next_model(kind, job.ranks_of(group), chunk)
        alike: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
        for buffer in buffers:
            dtypes = (buffer.param_dtype, buffer.grad_dtype)
            _register_buffer(
                *(buffer, alike[dtypes], chosen),
                kind=kind,
                group=group,
                model=model,
                chunk=chunk,
                names=parameters,
                config=ddp.config,
            )
            alike[dtypes] += 1

    _planned.append(weakref.ref(ddp))
    buckets = [bucket for *_, buffers in _kinds(ddp) for b in buffers for bucket in b.buckets]
    job.divide_gradients(ddp, buckets)
    for _, _, groups, _ in _kinds(ddp):
        _wait_for_collectives_alone(groups)
    names = [bucket.dpu_reduce_op.name for bucket in buckets]
    if len(set(names)) != len(names):
        raise RuntimeError(f"two gradient buckets share a BytePS name: {sorted(names)}")
    # The server optimizer declares the updated buckets, with their update rule.
    summed = [bucket for bucket in buckets if not bucket.dpu_reduce_op.updated]
    for bucket in summed:
        bucket.dpu_reduce_op.give_back_with(ddp, bucket.grad_data)
    declare(summed, ddp.ddp_config)
    if parameters and chunk == 0 and torch.distributed.get_rank() == 0:
        decisions.print_once(advice.types(buckets))
    through = [
        bucket for bucket in buckets if bucket.dpu_reduce_op.route != bytepslib.routes.COLLECTIVE
    ]
    spread = bytes_per_server(through)
    logger.info(
        "gradient sums: %d of %d buckets go through BytePS, chunk %d, %.1f MB from this rank; the "
        "%d servers get %.1f to %.1f MB each",
        *(len(through), len(names), chunk, sum(spread) / 1e6),
        *(len(spread), min(spread) / 1e6, max(spread) / 1e6),
    )


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


def _wait_for_collectives_alone(groups: Sequence[_ParamAndGradBucketGroup]) -> None:
    """Adjust the waits of bucket groups for each other. With
    ``reduce_scatter_with_fp32_accumulation`` a bucket group waits for the previous one, because the
    all-to-all of that group holds memory as large as its bucket. A sum through servers holds no
    such memory, so the group need not wait for it yet."""
    before: _ParamAndGradBucketGroup | None = None
    for group in groups:
        linked = group.previous_grad_reduce_bucket_group is not None
        through = goes_through_servers(group)
        group.previous_grad_reduce_bucket_group = before if linked and not through else None
        if not through:
            before = group


def _register_buffer(
    buffer: _ParamAndGradBuffer,
    index: int,
    chosen: dict[int, Decision],
    *,
    kind: str,
    group: _Group,
    model: int,
    chunk: int,
    names: dict[torch.nn.Parameter, str],
    config: TransformerConfig,
) -> None:
    ranks, owners = job.ranks_of(group), job.own_ranks_of(buffer.data_parallel_group)
    instances = buffer.ddp_config.num_distributed_optimizer_instances * job.replicas()
    if not set(owners) <= set(ranks) or len(owners) * instances != len(ranks):
        raise RuntimeError(
            f"--use-dpu-reduce: the {kind} data-parallel group {ranks} is not {instances} "
            f"optimizer instance(s) of ranks {owners}"
        )
    wire = wire_of(buffer.param_dtype, buffer.grad_dtype, buffer.ddp_config)
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
            wire=wire,
            route=chosen[id(bucket)].route,
            updated=summed_later.are_updated([bucket], buffer.ddp_config),
            in_order=config.deterministic_mode,
        )
        if wire.is_block and op.route != bytepslib.routes.COLLECTIVE:
            bf16_part = kept_of(bucket, names, buffer.ddp_config, config if op.updated else None)
            if (
                op.updated and bf16_part is not None
            ):  # parameters whose gradients are kept as bf16 are pulled in their own type
                bf16_part = replace(bf16_part, itemsize=buffer.param_dtype.itemsize)
            op = replace(op, bf16_part=bf16_part)
        bucket.dpu_reduce_op = _placed(op, bucket, buffer, group)


def _placed(
    op: BucketOp, bucket: _ParamAndGradBucket, buffer: _ParamAndGradBuffer, group: _Group
) -> BucketOp:
    """Return the operation with its placement on the servers. With the node-first route it also
    gets its sums inside the host."""
    bps, routes = bytepslib.byteps, bytepslib.routes
    elements = bucket.grad_data.numel()
    if op.route == routes.COLLECTIVE or elements == 0:
        return op
    nbytes = op.wire.nbytes(elements)
    if op.route == routes.FLAT:
        partitions = bps.partition_count(nbytes, wire_dtype=op.wire)
        return replace(op, placement=named.next_placement(op.group, partitions))
    assert op.route == routes.NODE_FIRST
    sums = node_sums(op, bucket.grad_data, buffer, group)
    pushes = sums[0].pushes(job.rank(), bucket.grad_data.element_size())
    placement = named.next_placement(op.group, sum(push.partitions for push in pushes))
    whole, shards = (
        replace(node_sum, placement=placement) if node_sum else None for node_sum in sums
    )
    return replace(op, placement=placement, node_whole=whole, node_shards=shards)


def _chunk_index(module: torch.nn.Module) -> int:
    """Return the virtual pipeline stage of a model chunk. The chunk may be inside mixed-precision
    wrappers."""
    part: Any = module
    while True:
        stage = getattr(part, "vp_stage", None)
        if stage is not None:
            return int(stage)
        if not hasattr(part, "module"):
            return 0
        part = part.module
