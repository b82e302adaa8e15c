# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Data-parallel gradient sums through BytePS parameter servers.

With ``--use-dpu-reduce`` the buckets of ``DistributedDataParallel`` are summed by BytePS
(push to servers that add, pull the sum back) instead of by ``torch.distributed.all_reduce``.
Everything else of Megatron is untouched: which gradients form a bucket, when a bucket is ready,
how gradients are scaled before, and what the optimizer reads after, stay as they are.

Megatron calls this module at these places, each a hook of a line or two:

==========================  =======================================================
``validate_args``           the parsed arguments: refuse what is not supported
``validate_ddp_config``     a ``DistributedDataParallelConfig`` is made
``refuse_fsdp``             a fully sharded wrapper is built
``initialize``              torch.distributed is up: start BytePS once
``register``                a ``DistributedDataParallel`` was built: name its buckets
``start_grad_sync``         a bucket group is ready: push and pull it
``shutdown``                training is done
==========================  =======================================================

BytePS is imported when it is first needed, so that Megatron runs without it.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from argparse import Namespace

    from .distributed_data_parallel import DistributedDataParallel
    from .distributed_data_parallel_config import DistributedDataParallelConfig
    from .param_and_grad_buffer import (
        _ParamAndGradBucket,
        _ParamAndGradBucketGroup,
        _ParamAndGradBuffer,
    )

__all__ = [
    "BucketOp",
    "GradSyncHandle",
    "bucket_name",
    "bucket_priority",
    "initialize",
    "partition_count",
    "refuse_fsdp",
    "register",
    "shutdown",
    "start_grad_sync",
    "validate_args",
    "validate_ddp_config",
]

logger = logging.getLogger(__name__)

_CHUNK_PRIORITY_STRIDE = 1 << 16

_DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "uint8",
}

_WIRE_DTYPES = {"bf16": torch.bfloat16}
"""What ``--dpu-reduce-wire-dtype`` may name."""


# --------------------------------------------------------------------------- what is refused


@dataclass(frozen=True, kw_only=True)
class _Refusal:
    """A setting under which gradients do not take the path that this module replaces."""

    attributes: tuple[str, ...]
    """Its names, on the arguments and on the DDP config."""
    flag: str
    reason: str
    allowed: tuple[Any, ...] = (False, None)
    """Values that are not refused; ignored where ``refused`` is given."""
    refused: tuple[Any, ...] = ()
    """Values that are refused, all others being allowed."""
    allowed_like: str = ""
    """Another attribute, whose value is not refused either."""

    def applies_to(self, value: object, source: object) -> bool:
        if self.refused:
            return value in self.refused
        if self.allowed_like and value == getattr(source, self.allowed_like, None):
            return False
        return value not in self.allowed


_FSDP = "it shards gradients with reduce-scatters of its own, which BytePS does not replace"
_UNTRIED = "it has not been tried with gradients that BytePS sums"
_RESHARDED = (
    "its weights are Transformer Engine's, cut once more and summed in part by themselves, which "
    "has not been tried with gradients that BytePS sums"
)

_REFUSALS: tuple[_Refusal, ...] = (
    _Refusal(attributes=("use_megatron_fsdp",), flag="--use-megatron-fsdp", reason=_FSDP),
    _Refusal(attributes=("use_custom_fsdp",), flag="--use-custom-fsdp", reason=_FSDP),
    _Refusal(attributes=("use_torch_fsdp2",), flag="--use-torch-fsdp2", reason=_FSDP),
    _Refusal(
        attributes=("optimizer",),
        flag="--optimizer",
        reason="it shards whole layers, not buckets",
        refused=("dist_muon",),
    ),
    _Refusal(attributes=("fp8_param_gather",), flag="--fp8-param-gather", reason=_UNTRIED),
    _Refusal(attributes=("fp4_param_gather",), flag="--fp4-param-gather", reason=_UNTRIED),
    _Refusal(
        attributes=("reuse_grad_buf_for_mxfp8_param_ag",),
        flag="--reuse-grad-buf-for-mxfp8-param-ag",
        reason=_UNTRIED,
    ),
    _Refusal(
        attributes=(
            "reduce_scatter_with_fp32_accumulation",
            "ddp_reduce_scatter_with_fp32_accumulation",
        ),
        flag="--ddp-reduce-scatter-with-fp32-accumulation",
        reason="it replaces the sum by an all-to-all; BytePS servers already add half types in "
        "fp32",
    ),
    _Refusal(
        attributes=("nccl_ub",),
        flag="--use-nccl-ub",
        reason="it allocates the gradient buffers for NCCL's collectives, which would not be used",
    ),
    _Refusal(
        attributes=("tensor_parallel_num_weight_shards",),
        flag="--tensor-parallel-num-weight-shards",
        reason=_RESHARDED,
        allowed=(1, None),
        allowed_like="tensor_model_parallel_size",
    ),
    _Refusal(
        attributes=("expert_tensor_parallel_num_weight_shards",),
        flag="--expert-tensor-parallel-num-weight-shards",
        reason=_RESHARDED,
        allowed=(1, None),
        allowed_like="expert_tensor_parallel_size",
    ),
    _Refusal(
        attributes=("cuda_graph_impl",),
        flag="--cuda-graph-impl",
        reason="it records the gradient sums in a CUDA graph, and BytePS runs on the host",
        refused=("full_iteration",),
    ),
    _Refusal(
        attributes=("inprocess_restart",),
        flag="--inprocess-restart",
        reason="BytePS cannot rejoin its servers from within a restarted training function",
    ),
    _Refusal(
        attributes=("fake_process_group",),
        flag="--fake-process-group",
        reason="BytePS needs real ranks to sum over",
    ),
)


def _refuse(source: object) -> None:
    settings = ((refusal, name) for refusal in _REFUSALS for name in refusal.attributes)
    for refusal, name in settings:
        value = getattr(source, name, None)
        if refusal.applies_to(value, source):
            shown = refusal.flag if value is True else f"{refusal.flag}={value}"
            raise ValueError(
                f"--use-dpu-reduce does not work with {shown}: {refusal.reason}. "
                "Drop one of the two."
            )


def _check_wire_dtype(source: object) -> None:
    """``source`` is the arguments or a DDP config."""
    name = getattr(source, "dpu_reduce_wire_dtype", None)
    if name is None:
        return
    if not getattr(source, "use_dpu_reduce", False):
        raise ValueError(
            f"--dpu-reduce-wire-dtype={name} needs --use-dpu-reduce: without it no gradient goes "
            "through BytePS"
        )
    if name not in _WIRE_DTYPES:
        raise ValueError(
            f"--dpu-reduce-wire-dtype={name} is not known; it can be {', '.join(_WIRE_DTYPES)}"
        )


def validate_args(args: Namespace) -> None:
    """Check that the arguments allow BytePS gradient sums, where they ask for them.

    Raises:
        ValueError: an argument that cannot be combined with ``--use-dpu-reduce``; the text names
            both and the reason.
        RuntimeError: BytePS is not installed.
    """
    _check_wire_dtype(args)
    if not getattr(args, "use_dpu_reduce", False):
        return
    _refuse(args)
    _byteps()


def validate_ddp_config(ddp_config: DistributedDataParallelConfig) -> None:
    """Check a DDP config, for users of megatron.core who have no arguments.

    Raises:
        ValueError: a setting that cannot be combined with ``use_dpu_reduce``.
    """
    _check_wire_dtype(ddp_config)
    if ddp_config.use_dpu_reduce:
        _refuse(ddp_config)


def refuse_fsdp(ddp_config: DistributedDataParallelConfig) -> None:
    """Called where Megatron-FSDP or torch FSDP2 wraps a model.

    Raises:
        ValueError: the config asks for BytePS, which would otherwise be ignored without a word.
    """
    if ddp_config.use_dpu_reduce:
        raise ValueError(
            f"use_dpu_reduce does not work with fully sharded data parallelism: {_FSDP}. "
            "Drop one of the two."
        )


# --------------------------------------------------------------------------- BytePS itself


def _byteps() -> ModuleType:
    """The module ``byteps.torch``, imported when it is first needed.

    Raises:
        RuntimeError: it is not there or does not load.
    """
    try:
        import byteps.torch as bps
    except ImportError as error:
        raise RuntimeError(
            "--use-dpu-reduce needs the package byteps (the build of Megatron-BytePS, with "
            "byteps.torch), which this Python cannot import: "
            f"{error}. Install it with `make setup` in a Megatron-BytePS checkout, or "
            "`pip install <checkout>/build/byteps`; or drop --use-dpu-reduce."
        ) from error
    return bps


def initialize() -> None:
    """Start BytePS on this rank, once; later calls do nothing. Blocks until every rank is there.

    torch.distributed must be initialised: its ranks are the BytePS workers.

    Raises:
        RuntimeError: BytePS is missing, or counts its workers differently from torch.distributed.
        byteps.torch.BytePSError: the scheduler or a server cannot be reached.
    """
    bps = _byteps()
    if not torch.distributed.is_initialized():
        raise RuntimeError("--use-dpu-reduce: initialise torch.distributed before BytePS")
    if not bps.is_initialized():
        bps.init()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if (bps.rank(), bps.size()) != (rank, size):
        raise RuntimeError(
            f"BytePS is worker {bps.rank()} of {bps.size()}, torch.distributed is rank {rank} of "
            f"{size}: check RANK and WORLD_SIZE against DMLC_WORKER_ID and DMLC_NUM_WORKER"
        )


def shutdown() -> None:
    """Leave the BytePS job, if this process is in it. The other ranks may train on until they
    leave too. Safe to call more than once, and where BytePS was never started."""
    _registry.models.clear()
    _registry.partitions = 0
    bps = sys.modules.get("byteps.torch")
    if bps is not None and bps.is_initialized():
        bps.shutdown()


# --------------------------------------------------------------------------- names of buckets


@dataclass(frozen=True, kw_only=True)
class BucketOp:
    """What identifies the push-pull of one bucket; fixed when DDP is built.

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
    priority: int
    """Higher goes first. 0 for what the next forward pass needs first, negative after that."""
    placement: int
    """Place of the bucket's first partition in the round robin over the servers."""
    wire_dtype: torch.dtype
    """Type in which the gradients travel; that of the bucket, unless another was asked for."""


def bucket_name(
    *,
    kind: str,
    lowest_rank: int,
    model: int,
    chunk: int,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    bucket_id: int,
) -> str:
    """The key of a bucket: a pure function of what identifies it.

    Every rank of a data-parallel group computes the same name and no two groups of a job share
    one, whatever the order in which ranks build or sum their buckets: two groups of a kind are
    disjoint, so that their lowest global ranks differ.

    Args:
        kind: ``dense`` or ``expert``, the kind of the data-parallel group.
        lowest_rank: the lowest global rank in the group.
        model: how many models with this group and chunk the process wrapped before this one.
        chunk: index of the model chunk (virtual pipeline stage) on this rank.
        param_dtype: dtype of the buffer's parameters.
        grad_dtype: dtype in which the buffer's gradients are summed.
        bucket_id: index of the bucket in its buffer.
    """
    dtypes = f"{_dtype_name(param_dtype)}-{_dtype_name(grad_dtype)}"
    return f"dpu_reduce/{kind}/dp{lowest_rank}/model{model}/chunk{chunk}/{dtypes}/bucket{bucket_id}"


def bucket_priority(*, chunk: int, bucket_id: int, num_buckets: int) -> int:
    """Priority of a bucket: 0 is the highest.

    Buckets are filled in the order of the backward pass, so that the last one of a buffer holds
    the parameters that the next forward pass uses first, and chunk 0 runs before chunk 1.
    """
    return -(num_buckets - 1 - bucket_id) - chunk * _CHUNK_PRIORITY_STRIDE


def partition_count(nbytes: int, partition_bytes: int) -> int:
    """Number of partitions into which BytePS cuts a tensor of ``nbytes`` bytes."""
    return -(-nbytes // partition_bytes)


def _dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(kw_only=True)
class _Registry:
    """What this process has named so far. Every rank of a group builds the same models in the
    same order, so that the members agree on both numbers."""

    models: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    """Models by kind of group, lowest rank of the group, and chunk."""
    partitions: int = 0
    """Partitions of all buckets: the next place in the round robin over the servers."""


_registry = _Registry()


def register(ddp: DistributedDataParallel) -> None:
    """Give each bucket of a newly built DDP its :class:`BucketOp`.

    Starts BytePS too where ``megatron.training`` did not.

    Raises:
        ValueError: the config is not supported; the text says why.
    """
    validate_ddp_config(ddp.ddp_config)
    chunk = _chunk_index(ddp.module)
    dense, expert = _ranks(ddp.dp_cp_group), _ranks(ddp.expt_dp_group)
    plan = [("dense", dense, buffer) for buffer in ddp.buffers]
    plan += [("expert", expert, buffer) for buffer in ddp.expert_parallel_buffers]
    initialize()

    models: dict[str, int] = {}
    for kind, group, buffer in plan:
        if kind not in models:
            models[kind] = _registry.models[(kind, min(group), chunk)]
            _registry.models[(kind, min(group), chunk)] += 1
        wire_dtype = _wire_dtype(buffer.grad_dtype, ddp.ddp_config)
        _register_buffer(
            buffer,
            kind=kind,
            group=group,
            model=models[kind],
            chunk=chunk,
            wire_dtype=wire_dtype,
        )

    names = [bucket.dpu_reduce_op.name for *_, buffer in plan for bucket in buffer.buckets]
    if len(set(names)) != len(names):
        raise RuntimeError(f"two gradient buckets share a BytePS name: {sorted(names)}")
    spread = _spread(ddp)
    logger.info(
        "gradient sums go through BytePS: %d buckets, chunk %d, %.1f MB from this rank; the %d "
        "servers get %.1f to %.1f MB each",
        *(len(names), chunk, sum(spread) / 1e6),
        *(len(spread), min(spread) / 1e6, max(spread) / 1e6),
    )


def _spread(ddp: DistributedDataParallel) -> list[int]:
    """Bytes that this rank pushes to each server in one step of a model chunk."""
    bps = _byteps()
    total: list[int] = []
    for buffer in [*ddp.buffers, *ddp.expert_parallel_buffers]:
        for bucket in buffer.buckets:
            op: BucketOp = bucket.dpu_reduce_op
            nbytes = bucket.grad_data.numel() * op.wire_dtype.itemsize
            part = bps.bytes_per_server(
                nbytes, name=op.name, group=op.group, placement=op.placement
            )
            total = [a + b for a, b in zip(total or [0] * len(part), part, strict=True)]
    return total or [0]


def _wire_dtype(grad_dtype: torch.dtype, ddp_config: DistributedDataParallelConfig) -> torch.dtype:
    """The wire type that was asked for is for fp32: of a half type it would keep less."""
    if ddp_config.dpu_reduce_wire_dtype is None or grad_dtype != torch.float32:
        return grad_dtype
    return _WIRE_DTYPES[ddp_config.dpu_reduce_wire_dtype]


def _ranks(group: torch.distributed.ProcessGroup) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(group))


def _register_buffer(
    buffer: _ParamAndGradBuffer,
    *,
    kind: str,
    group: tuple[int, ...],
    model: int,
    chunk: int,
    wire_dtype: torch.dtype,
) -> None:
    bps = _byteps()
    owners = _ranks(buffer.data_parallel_group)
    instances = buffer.ddp_config.num_distributed_optimizer_instances
    if not set(owners) <= set(group) or len(owners) * instances != len(group):
        raise RuntimeError(
            f"--use-dpu-reduce: the {kind} data-parallel group {group} is not {instances} "
            f"optimizer instance(s) of ranks {owners}"
        )
    for bucket in buffer.buckets:
        bucket.dpu_reduce_op = BucketOp(
            name=bucket_name(
                kind=kind,
                lowest_rank=min(group),
                model=model,
                chunk=chunk,
                param_dtype=buffer.param_dtype,
                grad_dtype=buffer.grad_dtype,
                bucket_id=bucket.bucket_id,
            ),
            group=group,
            owners=owners,
            priority=bucket_priority(
                chunk=chunk, bucket_id=bucket.bucket_id, num_buckets=len(buffer.buckets)
            ),
            # Groups, of which each counts its own partitions, begin at different servers.
            placement=_registry.partitions + min(group),
            wire_dtype=wire_dtype,
        )
        nbytes = bucket.grad_data.numel() * wire_dtype.itemsize
        _registry.partitions += partition_count(nbytes, bps.partition_bytes(nbytes))


def _chunk_index(module: torch.nn.Module) -> int:
    """Virtual pipeline stage of a model chunk, which mixed-precision wrappers may hide."""
    while True:
        stage = getattr(module, "vp_stage", None)
        if stage is not None:
            return int(stage)
        if not hasattr(module, "module"):
            return 0
        module = module.module


# --------------------------------------------------------------------------- the gradient sums


class GradSyncHandle:
    """The push-pulls of a bucket group that are under way; stands in for torch's Work."""

    def __init__(self, pending: Sequence[tuple[Any, torch.Tensor]]) -> None:
        # The tensors are kept alive as long as BytePS writes to them.
        self._pending = list(pending)

    def wait(self) -> None:
        """Block until the sums are in the buckets. A second call does nothing.

        Raises:
            byteps.torch.BytePSError: a push-pull failed; the text names the peer.
        """
        pending, self._pending = self._pending, []
        for handle, _ in pending:
            _byteps().synchronize(handle)


def _wanted(bucket: _ParamAndGradBucket, op: BucketOp) -> tuple[int, int]:
    """First and last plus one of the bucket's elements that this rank's optimizer owns."""
    shard = bucket.grad_data.numel() // len(op.owners)
    index = op.owners.index(torch.distributed.get_rank())
    return index * shard, (index + 1) * shard


def start_grad_sync(
    bucket_group: _ParamAndGradBucketGroup, force_all_reduce: bool | None = False
) -> GradSyncHandle | None:
    """Sum the buckets of a group over its data-parallel ranks, in place.

    Called where Megatron would issue its all-reduce or reduce-scatter: local gradients are
    accumulated and scaled. Buckets are pushed whole, in the dtype in which they are summed or that
    of ``dpu_reduce_wire_dtype``. With the distributed optimizer each rank pulls the shard that it
    owns, and the rest of its bucket keeps the local gradients; ``force_all_reduce`` pulls all of
    it. Where there are several instances of that optimizer, Megatron sums within each, then across
    them; here it is one sum over all members of all instances. ``average_in_collective`` asks
    BytePS for the average over the data-parallel group instead of the sum.

    Returns:
        with ``overlap_grad_reduce`` a handle to wait for, as all-reduce does; otherwise ``None``,
        the sums being in the buckets.

    Raises:
        byteps.torch.BytePSError: a push-pull failed; the text names the peer.
    """
    bps = _byteps()
    sharded = bucket_group.ddp_config.use_distributed_optimizer and not force_all_reduce
    pending = []
    for bucket in bucket_group.buckets:
        op: BucketOp = bucket.dpu_reduce_op
        if len(op.group) == 1 or bucket.grad_data.numel() == 0:
            continue
        handle = bps.push_pull_async_inplace(
            bucket.grad_data,
            average=bucket_group.ddp_config.average_in_collective,
            name=op.name,
            priority=op.priority,
            placement=op.placement,
            group=op.group,
            pull=_wanted(bucket, op) if sharded else None,
            wire_dtype=op.wire_dtype,
        )
        pending.append((handle, bucket.grad_data))
    handle = GradSyncHandle(pending)
    if bucket_group.ddp_config.overlap_grad_reduce:
        return handle
    handle.wait()
    return None
