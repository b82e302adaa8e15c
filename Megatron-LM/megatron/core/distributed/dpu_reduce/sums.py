# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""The sums themselves, where Megatron would issue its collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from . import bytepslib, replicas
from .bucket_op import BucketOp

if TYPE_CHECKING:
    from ..param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBucketGroup


class _Pending(Protocol):
    def wait(self) -> None: ...


class _PushPull:
    """A push-pull of a whole bucket in flight."""

    def __init__(self, handle: Any, tensor: torch.Tensor) -> None:
        self._handle = handle
        # Kept alive as long as BytePS writes to it.
        self._tensor = tensor

    def wait(self) -> None:
        bytepslib.byteps.synchronize(self._handle)


class GradSyncHandle:
    """The sums of a bucket group in flight; stands in for torch's Work."""

    def __init__(self, pending: Sequence[_Pending]) -> None:
        self._pending = list(pending)

    def wait(self) -> None:
        """Block until the sums are in the buckets. A second call does nothing.

        Raises:
            byteps.torch.BytePSError: a push-pull failed; the text names the peer.
        """
        pending, self._pending = self._pending, []
        for one in pending:
            one.wait()


def goes_through_servers(bucket_group: _ParamAndGradBucketGroup) -> bool:
    """Whether a bucket of the group is summed by servers."""
    return replicas.sum_gradients() and any(
        bucket.dpu_reduce_op.route != bytepslib.routes.COLLECTIVE for bucket in bucket_group.buckets
    )


def start_grad_sync(
    bucket_group: _ParamAndGradBucketGroup, force_all_reduce: bool | None = False
) -> GradSyncHandle | None:
    """Sum the buckets of a group over its data-parallel ranks, in place.

    Called where Megatron would issue its all-reduce or reduce-scatter: local gradients are
    accumulated and scaled. They travel in the dtype in which they are summed or that of
    ``dpu_reduce_wire_dtype``. With the distributed optimizer each rank gets the shard that it owns,
    and the rest of its bucket is undefined; ``force_all_reduce`` gets all of it. Where there are
    several instances of that optimizer, Megatron sums within each, then across them; here it is
    one sum over all members of all instances. ``average_in_collective`` asks for the average over
    the data-parallel group instead of the sum.

    Returns:
        with ``overlap_grad_reduce`` a handle to wait for, as all-reduce does; otherwise ``None``,
        the sums being in the buckets.

    Raises:
        byteps.torch.BytePSError: a push-pull failed; the text names the peer.
        RuntimeError: node first, a rank of this host was lost.
    """
    sharded = bool(bucket_group.ddp_config.use_distributed_optimizer and not force_all_reduce)
    average = bucket_group.ddp_config.average_in_collective
    pending = [
        _start(bucket, bucket.dpu_reduce_op, sharded=sharded, average=average)
        for bucket in bucket_group.buckets
        if len(bucket.dpu_reduce_op.group) > 1 and bucket.grad_data.numel() > 0
    ]
    handle = GradSyncHandle(pending)
    if bucket_group.ddp_config.overlap_grad_reduce:
        return handle
    handle.wait()
    return None


def _start(bucket: _ParamAndGradBucket, op: BucketOp, *, sharded: bool, average: bool) -> _Pending:
    if op.kept is None:
        return _start_all(bucket, op, sharded=sharded, average=average)
    # First, so that their values do not count for the scale of any block.
    kept = op.kept.start(op, bucket.grad_data, average=average)
    return kept.after(_start_all(bucket, op, sharded=sharded, average=average))


def _start_all(
    bucket: _ParamAndGradBucket, op: BucketOp, *, sharded: bool, average: bool
) -> _Pending:
    if op.node_whole is not None:
        node = (op.node_shards if sharded else None) or op.node_whole
        return node.start(bucket.grad_data)
    # All buckets have one priority, since the optimizer needs every one of them. Where ranks are
    # not level, a newer bucket that overtakes makes both wait for the slowest rank.
    handle = bytepslib.byteps.push_pull_async_inplace(
        bucket.grad_data,
        average=average,
        name=op.name,
        placement=op.placement,
        group=op.group,
        pull=op.wanted(bucket.grad_data.numel()) if sharded else None,
        wire_dtype=op.wire,
    )
    return _PushPull(handle, bucket.grad_data)
