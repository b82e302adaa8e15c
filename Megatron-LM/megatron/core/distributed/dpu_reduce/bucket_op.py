# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""The operation of one bucket: its name, group, wire dtype and route."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from . import bytepslib, job
from .kept import Kept

if TYPE_CHECKING:
    from byteps.torch.nodes import NodeSum
    from byteps.torch.wire import WireType

    from ..distributed_data_parallel_config import DistributedDataParallelConfig
    from ..param_and_grad_buffer import _ParamAndGradBucket


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
    wire: WireType
    """In which the gradients travel; that of the bucket, unless another was asked for."""
    kept: Kept | None = None
    """Of gradients in blocks of few bits: those that travel in 16 bits."""
    route: str
    """``collective``, ``flat`` or ``node-first``; the same for all buckets of a bucket group."""
    updated: bool = False
    """Servers update the bucket's parameters, and answer with them."""
    node_whole: NodeSum | None = None
    """Node first: the sum of which every rank gets all."""
    node_shards: NodeSum | None = None
    """Node first, with the distributed optimizer: the sum of which each rank gets its shard."""

    def wanted(self, elements: int) -> tuple[int, int]:
        """First and last plus one of the bucket's elements that this rank's optimizer owns."""
        shard = elements // len(self.owners)
        index = self.owners.index(job.rank())
        return index * shard, (index + 1) * shard


def wire_of(
    param_dtype: torch.dtype, grad_dtype: torch.dtype, ddp_config: DistributedDataParallelConfig
) -> WireType:
    """The type in which gradients travel.

    bf16 is for fp32: of a half type it would keep no more. With the optimizer on the servers,
    parameters come down in it, so that fp32 ones do not use it. Of blocks they come down as
    differences.
    """
    wire, name = bytepslib.wire, ddp_config.dpu_reduce_wire_dtype
    if name is None:
        return wire.of(grad_dtype)
    asked = wire.NAMES[name]
    keeps = grad_dtype != torch.float32 or (
        ddp_config.dpu_optimizer and param_dtype == torch.float32
    )
    if not asked.is_block and keeps:
        return wire.of(grad_dtype)
    if asked.is_block and ddp_config.dpu_reduce_feedback != "auto":
        asked = replace(asked, feedback=ddp_config.dpu_reduce_feedback == "on")
    return wire.of(grad_dtype, asked)


def wire_bytes(bucket: _ParamAndGradBucket, config: DistributedDataParallelConfig) -> int:
    """Bytes of a bucket as it travels, in the busier direction: parameters that servers update come
    down as differences in 8 bits where gradients go up in 4."""
    param_dtype, elements = next(iter(bucket.params_list)).dtype, bucket.grad_data.numel()
    wire = wire_of(param_dtype, bucket.grad_data.dtype, config)
    if config.dpu_optimizer and wire.is_block:
        return max(wire.nbytes(elements), bytepslib.wire.int8().nbytes(elements))
    return wire.nbytes(elements)
