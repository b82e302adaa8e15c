# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Starts and awaits sums, in place of Megatron's collectives.

**Steps in a CUDA graph.** ``FullCudaGraphWrapper`` records a whole forward and backward pass. A
replay runs none of Megatron's Python, but BytePS runs on the host. So ``finalize_model_grads`` and
everything that it calls run after each replay. The sums of a step then do not overlap its backward
pass.

**Megatron-FSDP with hybrid sharding.** ``torch.distributed`` reduce-scatters gradients within a
replica of the model. Then each shard is all-reduced over replicas, through servers if these are
faster. Megatron-FSDP orders its work by streams and events, but only the host knows the end of a
push-pull. So a sum has an event of a class of this module; waiting for the event waits for the sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from . import bytepslib, job
from .bucket_op import BucketOp

if TYPE_CHECKING:
    from byteps.torch.c10d.reductions import Reductions

    from ..distributed_data_parallel_config import DistributedDataParallelConfig
    from ..param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBucketGroup


class _Pending(Protocol):
    def wait(self) -> None: ...


class _PushPull:
    """A push-pull of a whole bucket in flight."""

    def __init__(self, handle: Any, tensor: torch.Tensor) -> None:
        self._handle = handle
        # This reference keeps the tensor alive while BytePS writes to it.
        self._tensor = tensor

    def wait(self) -> None:
        bytepslib.byteps.synchronize(self._handle)


class GradSyncHandle:
    """Sums of a bucket group in flight. It stands in for torch's Work."""

    def __init__(self, pending: Sequence[_Pending]) -> None:
        self._pending = list(pending)

    def wait(self) -> None:
        """Block until the sums are in the buckets. A second call does nothing.

        Raises:
            byteps.torch.BytePSError: a push-pull failed; the text names the peer.
        """
        pending, self._pending = self._pending, []
        for operation in pending:
            operation.wait()


def goes_through_servers(bucket_group: _ParamAndGradBucketGroup) -> bool:
    """Return whether servers sum a bucket of the group."""
    return job.sums_gradients() and any(
        bucket.dpu_reduce_op.route != bytepslib.routes.COLLECTIVE for bucket in bucket_group.buckets
    )


def start_grad_sync(
    bucket_group: _ParamAndGradBucketGroup, force_all_reduce: bool | None = False
) -> GradSyncHandle | None:
    """Sum the buckets of a group over its data-parallel ranks, in place.

    This replaces Megatron's all-reduce or reduce-scatter. Local gradients are already accumulated
    and scaled. They travel in their own dtype or in ``dpu_reduce_wire_dtype``. With the distributed
    optimizer, each rank gets the shard that it owns, and the rest of its bucket is undefined; with
    ``force_all_reduce`` each rank gets the whole bucket. With several instances of the distributed
    optimizer, Megatron sums within each instance, then across instances; this function makes one
    sum over all members. With ``average_in_collective`` the result is the average over the
    data-parallel group.

    Returns:
        with ``overlap_grad_reduce`` a handle to wait for, like an all-reduce; otherwise ``None``,
        and the sums are in the buckets.

    Raises:
        byteps.torch.BytePSError: a push-pull failed; the text names the peer.
        RuntimeError: with the node-first route, a rank of this host was lost.
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
    if op.bf16_part is None:
        return _start_all(bucket, op, sharded=sharded, average=average)
    # The values that stay bf16 are taken out first, so that they do not influence the scale of a
    # block.
    bf16_operation = op.bf16_part.start(op, bucket.grad_data, average=average)
    return bf16_operation.after(_start_all(bucket, op, sharded=sharded, average=average))


def _start_all(
    bucket: _ParamAndGradBucket, op: BucketOp, *, sharded: bool, average: bool
) -> _Pending:
    if op.node_whole is not None:
        node = (op.node_shards if sharded else None) or op.node_whole
        return node.start(bucket.grad_data)
    # All buckets have the same priority, because the optimizer needs every bucket. If a newer
    # bucket overtook an older one while ranks are at different buckets, both would wait for the
    # last rank.
    handle = bytepslib.byteps.push_pull_async_inplace(
        bucket.grad_data,
        average=average,
        name=op.name,
        placement=op.placement,
        group=op.group,
        pull=op.wanted(bucket.grad_data.numel()) if sharded else None,
        wire_dtype=op.wire,
        in_order=op.in_order,
    )
    return _PushPull(handle, bucket.grad_data)


# Steps in a CUDA graph.


_Sums = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class _Finalize:
    """Call of ``finalize_model_grads`` that is postponed until after a recorded pass."""

    function: _Sums
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Arguments of the call. Their tensors are in the graph's memory, and a replay writes new
    values into them."""


def run(step: Callable[[], Any], model: Sequence[Any]) -> Any:
    """Run a step (recorded, replayed, or neither yet), then sum its gradients.

    Args:
        step: a forward and backward pass.
        model: model chunks, each a ``DistributedDataParallel``.

    Returns:
        the result of `step`.

    Raises:
        byteps.torch.BytePSError: a sum failed; the text names the peer.
    """
    first = model[0]
    with _nothing_summed(model):
        result = step()
    finalize: _Finalize | None = getattr(first, "dpu_reduce_finalize", None)
    if finalize is not None:
        _start_at_once(model, bool(finalize.kwargs.get("force_all_reduce")))
        finalize.function(*finalize.args, **finalize.kwargs)
    return result


@contextmanager
def _nothing_summed(model: Sequence[Any]) -> Iterator[None]:
    """Return a context for a pass whose gradients are not summed. In it no micro-batch counts as
    the last. The call of ``finalize_model_grads`` that ends the pass is recorded, but not made."""
    first = model[0]
    config = first.config
    names = ("no_sync_func", "grad_sync_func", "finalize_model_grads_func")
    before = {name: getattr(config, name) for name in names}
    finalize = before["finalize_model_grads_func"]

    def note(*args: Any, **kwargs: Any) -> None:
        first.dpu_reduce_finalize = _Finalize(function=finalize, args=args, kwargs=kwargs)

    config.no_sync_func = config.grad_sync_func = None
    config.finalize_model_grads_func = None if finalize is None else note
    try:
        with ExitStack() as stack:
            for chunk in model:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _start_at_once(model: Sequence[Any], force_all_reduce: bool) -> None:
    """Start all sums through servers before any wait. ``finalize_model_grads`` makes the
    collectives: it starts and awaits one bucket group after another, because without a backward
    pass its gradient counters treat each step as the first."""
    for chunk in model:
        if not chunk.ddp_config.overlap_grad_reduce:
            continue
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if goes_through_servers(group):
                group.start_grad_sync(force_all_reduce=force_all_reduce)


def are_summed_outside(model: Any) -> bool:
    """Return whether a bucket of this chunk, or of these chunks, goes through servers."""
    chunks = model if isinstance(model, list) else [model]
    return any(
        goes_through_servers(group)
        for chunk in chunks
        if getattr(getattr(chunk, "ddp_config", None), "use_dpu_reduce", False)
        for group in getattr(chunk, "bucket_groups", [])
        + getattr(chunk, "expert_parallel_bucket_groups", [])
    )


# Sums over the replicas of a model that Megatron-FSDP shards.


_Group = torch.distributed.ProcessGroup
_Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a tensor and a sum to be copied into it."""

_known: weakref.WeakKeyDictionary[_Group, Reductions] = weakref.WeakKeyDictionary()


def forget() -> None:
    """Reset. The sums of each group then get new names."""
    for reductions in _known.values():
        reductions.close()
    _known.clear()


class OuterReduction:
    """All-reduces, over replicas, of a bucket group."""

    def __init__(self, config: DistributedDataParallelConfig, group: _Group) -> None:
        """
        Args:
            config: DDP config of the model.
            group: the ranks that hold the same shard.
        """
        self._group = group
        self._reductions = None
        if getattr(config, "use_dpu_reduce", False):
            self._reductions = _reductions(config, group)
        self._works: list[Any] = []

    def all_reduce(self, tensor: torch.Tensor, op: torch.distributed.ReduceOp.RedOpType) -> None:
        """Start the sum or average of a tensor, in place.

        Sums that a CUDA graph records stay with NCCL, because a replay runs nothing on the host.

        Raises:
            byteps.torch.BytePSError: the job failed, or members disagree about the tensor.
        """
        work = None
        if self._reductions is not None:
            average = op == torch.distributed.ReduceOp.AVG
            work = self._reductions.begin(tensor, average=average)
        if work is None:
            torch.distributed.all_reduce(tensor, group=self._group, op=op)
        else:
            self._works.append(work)

    def end(self, copies: _Copies, stream: torch.cuda.Stream) -> Any:
        """Return an event for all sums that were started on this stream.

        Returns:
            an event. After a wait for it, the sums are there, and copied.
        """
        if self._works:
            return _SumsEvent(self._works, copies, stream)
        _copy(copies)
        return stream.record_event()


class _SumsEvent:
    """Event of sums in flight. It stands in for a CUDA event."""

    def __init__(self, works: Sequence[Any], copies: _Copies, stream: torch.cuda.Stream) -> None:
        self._works, self._copies, self._stream = list(works), list(copies), stream
        self._event: Any = None

    def wait(self) -> None:
        """Block until the sums are there; on a GPU, for work queued on the current stream from now
        on.

        Raises:
            byteps.torch.BytePSError: a sum failed; the text names the peer.
        """
        if self._event is None:
            with torch.cuda.stream(self._stream):
                for work in self._works:
                    work.wait()
                _copy(self._copies)
                self._event = self._stream.record_event()
            self._works, self._copies = [], []
        self._event.wait()


def _copy(copies: _Copies) -> None:
    for into, value in copies:
        into.copy_(value)


def _reductions(config: DistributedDataParallelConfig, group: _Group) -> Reductions:
    if group not in _known:
        _known[group] = bytepslib.reductions.Reductions(
            bytepslib.identity.of_group(group),
            "megatron-fsdp",
            bytepslib.reductions.Settings(
                backend=config.dpu_reduce_backend or bytepslib.routes.AUTO,
                min_bytes=1,
                wire_dtype=config.dpu_reduce_wire_dtype or bytepslib.reductions.SAME,
            ),
        )
    return _known[group]
