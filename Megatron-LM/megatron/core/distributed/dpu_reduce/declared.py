# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""What the servers are told of a model's buckets, and what each of them gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import bytepslib, job

if TYPE_CHECKING:
    from ..distributed_data_parallel_config import DistributedDataParallelConfig
    from ..param_and_grad_buffer import _ParamAndGradBucket
    from .bucket_op import BucketOp


def declare(buckets: Sequence[_ParamAndGradBucket], config: DistributedDataParallelConfig) -> None:
    """Tell the servers of all sums by one message to each, so that no first step waits for them.

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
        # Only these are summed at every step. The whole of a bucket that the optimizer shards is
        # summed when somebody asks for it, and declares itself then.
        if op.kept is not None:
            declarations.append(op.kept.declaration(op, grads, average=average))
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
            )
        )
    if declarations:
        bps.declare(declarations)


def bytes_per_server(buckets: Sequence[_ParamAndGradBucket]) -> list[int]:
    """Bytes that this rank pushes to each server in one step, of these buckets."""
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
        if op.kept is not None:
            parts.append(op.kept.bytes_per_server(op))
        for part in parts:
            total = [a + b for a, b in zip(total, part, strict=True)]
    return total
