# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""The operation that sums a bucket: its name, group, wire dtype and route.

Norms, biases and routers have few values, and each value matters. A block of few bits has one
scale, set by its largest value. In a block with other parameters, the smaller values would lose
most of their bits. So the gradients of norms, biases and routers are kept separate, and travel as
bf16.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from . import bytepslib, job, kept_bf16

if TYPE_CHECKING:
    from byteps.torch import TensorDeclaration
    from byteps.torch.nodes import HostLayout, NodeSum
    from byteps.torch.wire import WireType

    from ...transformer.transformer_config import TransformerConfig
    from ..distributed_data_parallel_config import DistributedDataParallelConfig
    from ..param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBuffer


_DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "uint8",
}


@functools.lru_cache(maxsize=64)
def group_name(group: tuple[int, ...]) -> str:
    """Return a name for a group: its lowest rank, its size, and a digest of all its ranks.

    The name depends on the ranks alone, so all members compute the same name, and each group has
    another one.
    """
    ranks = ",".join(map(str, sorted(group)))
    digest = hashlib.blake2s(ranks.encode(), digest_size=6).hexdigest()
    return f"dp{min(group)}x{len(group)}-{digest}"


def bucket_name(
    *,
    kind: str,
    group: tuple[int, ...],
    model: int,
    chunk: int,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    bucket_id: int,
    buffer: int = 0,
) -> str:
    """Return the name of a bucket, which depends on nothing but these arguments.

    Every rank of a data-parallel group computes the same name, and no two groups of a job share a
    name, in whatever order ranks build or sum their buckets.

    Args:
        kind: ``dense`` or ``expert``, the kind of the data-parallel group.
        group: the global ranks of the group.
        model: number of models with this kind, group and chunk that the process wrapped before.
        chunk: index of the model chunk (virtual pipeline stage) on this rank.
        param_dtype: dtype of the buffer's parameters.
        grad_dtype: dtype in which the buffer's gradients are summed.
        bucket_id: index of the bucket in its buffer.
        buffer: index of the buffer among those of the model chunk that have these dtypes.
    """
    dtypes = f"{_dtype_name(param_dtype)}-{_dtype_name(grad_dtype)}"
    if buffer:
        dtypes += f"-{buffer}"
    return (
        f"dpu_reduce/{kind}/{group_name(group)}/model{model}/chunk{chunk}/{dtypes}/"
        f"bucket{bucket_id}"
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(kw_only=True)
class Named:
    """Counters from which this process makes names.

    Counts are per group. The members of a group build the same models for it in the same order, but
    may build models for other groups in between.
    """

    models: Counter[tuple[str, tuple[int, ...], int]] = field(default_factory=Counter)
    """Number of models so far, by kind of group, group, and chunk."""
    partitions: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Number of partitions of a group's buckets so far, which is the next index in the round robin
    over servers."""

    def clear(self) -> None:
        self.models.clear()
        self.partitions.clear()

    def next_model(self, kind: str, group: tuple[int, ...], chunk: int) -> int:
        """Return the number of earlier models with this key, and count one more."""
        key = (kind, tuple(sorted(group)), chunk)
        self.models[key] += 1
        return self.models[key] - 1

    def next_placement(self, group: tuple[int, ...], partitions: int) -> int:
        """Reserve indices for `partitions` partitions of a sum in the round robin. Return the first
        index."""
        key = tuple(sorted(group))
        first = self.partitions[key] + key[0]
        self.partitions[key] += partitions
        return first


named = Named()
"""Names of this process."""


_ROUTER = re.compile(r"\brouter\b")


@dataclass(frozen=True)
class Kept:
    """Ranges of a bucket whose gradients travel as bf16, in a tensor of their own."""

    ranges: tuple[tuple[int, int], ...]
    """Ranges of elements of the bucket: the first element, and the last plus one."""
    parameters: tuple[torch.nn.Parameter, ...]
    """Parameters with these gradients, in the order of the ranges."""

    itemsize: int = 2
    """Bytes per element on the network."""

    @property
    def numel(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    @property
    def nbytes(self) -> int:
        """Total bytes on the network."""
        return self.numel * self.itemsize

    @staticmethod
    def name_of(op: BucketOp) -> str:
        """Return the name under which these gradients are summed."""
        return f"{op.name}/kept"

    def declaration(self, op: BucketOp, grads: torch.Tensor, *, average: bool) -> TensorDeclaration:
        """Return the declaration for the servers."""
        return bytepslib.byteps.TensorDeclaration(
            name=self.name_of(op),
            dtype=grads.dtype,
            numel=self.numel,
            average=average,
            group=op.group,
            placement=op.placement,
            wire_dtype=_wire(grads),
            device=grads.device,
            in_order=op.in_order,
        )

    def bytes_per_server(self, op: BucketOp) -> list[int]:
        """Return the bytes that a rank pushes to each server, in the order of ranks."""
        return bytepslib.byteps.bytes_per_server(
            self.nbytes, name=self.name_of(op), group=op.group, placement=op.placement
        )

    def start(self, op: BucketOp, grads: torch.Tensor, *, average: bool) -> _PendingKept:
        """Start summing these gradients. Zero them in the bucket, so that its sum leaves them
        out."""
        parts = [grads[begin:end] for begin, end in self.ranges]
        values = torch.cat(parts)
        torch._foreach_zero_(parts)
        handle = bytepslib.byteps.push_pull_async_inplace(
            values,
            average=average,
            name=self.name_of(op),
            placement=op.placement,
            group=op.group,
            wire_dtype=_wire(grads),
            in_order=op.in_order,
        )
        return _PendingKept(handle, values, parts)


class _PendingKept:
    def __init__(self, handle: Any, values: torch.Tensor, parts: list[torch.Tensor]) -> None:
        self._handle = handle
        self._values = values
        self._parts = parts
        self._others: Any = None

    def after(self, others: Any) -> _PendingKept:
        """Set the operation of the bucket's other gradients. It must end first, because both
        operations write to the same memory."""
        self._others = others
        return self

    def wait(self) -> None:
        """Wait for both operations, then write the sums into the bucket."""
        self._others.wait()
        bytepslib.byteps.synchronize(self._handle)
        sums = self._values.split([part.numel() for part in self._parts])
        torch._foreach_copy_(self._parts, sums)


def kept_of(
    bucket: _ParamAndGradBucket,
    names: dict[torch.nn.Parameter, str],
    config: DistributedDataParallelConfig,
    model: TransformerConfig | None = None,
) -> Kept | None:
    """Return the part of a bucket that travels as bf16; None if there is none.

    Args:
        names: names of the model's parameters.
        config: DDP config. Its `dpu_reduce_keep_bf16` adds to the parameters that are always kept.
        model: config of the model if servers update it. Parameters with copies on other ranks are
            then kept, too.
    """
    rules = kept_bf16.parse(config.dpu_reduce_keep_bf16)
    least = rules.least_bytes
    if least is None:
        least = bytepslib.server_bucket.least_in_few_bits()
    ranges: list[tuple[int, int]] = []
    kept_parameters: list[tuple[int, torch.nn.Parameter]] = []
    for parameter, (begin, end) in bucket.param_to_index.items():
        name, nbytes = names.get(parameter, ""), (end - begin) * bucket.grad_data.itemsize
        named = _ROUTER.search(name) or any(pattern.search(name) for pattern in rules.patterns)
        if parameter.dim() < 2 or nbytes < least or named or is_copied(parameter, model):
            ranges.append((begin, end))
            kept_parameters.append((begin, parameter))
    if not ranges:
        return None
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    kept_parameters.sort(key=lambda pair: pair[0])
    return Kept(tuple(merged), tuple(parameter for _, parameter in kept_parameters))


def is_copied(parameter: torch.nn.Parameter, config: TransformerConfig | None) -> bool:
    """Return whether tensor-parallel ranks or pipeline stages have copies of a parameter.

    Servers update each copy separately, with the same gradients. In blocks, each copy would share a
    block with other values and be rounded differently, so the copies would drift apart.
    """
    if config is None:
        return False
    tp = config.tensor_model_parallel_size
    if not getattr(parameter, "allreduce", True):  # An expert's parameter.
        tp = getattr(config, "expert_tensor_parallel_size", None) or tp
    if tp > 1 and not getattr(parameter, "tensor_model_parallel", False):
        return True
    marks = ("shared_embedding", "shared", "pipeline_parallel")
    return config.pipeline_model_parallel_size > 1 and any(
        getattr(parameter, mark, False) for mark in marks
    )


def _wire(grads: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if grads.dtype == torch.float32 else grads.dtype


@dataclass(frozen=True, kw_only=True)
class BucketOp:
    """Operation that sums a bucket; fixed when DDP is built.

    It holds no address of the gradients, because their buffers may be freed and allocated again
    between steps.
    """

    name: str
    """Name of the bucket: the same on every rank of the group, unique in the job."""
    group: tuple[int, ...]
    """Global ranks that sum: the whole data-parallel group, in the order of the process group."""
    owners: tuple[int, ...]
    """Global ranks among which the distributed optimizer cuts the bucket into equal shards, in this
    order. They are the members of this rank's optimizer instance (with one instance, the whole
    group).
    """
    placement: int
    """Index of the bucket's first partition in the round robin over the servers."""
    wire: WireType
    """Type in which the gradients travel; by default the type of the bucket."""
    bf16_part: Kept | None = None
    """Gradients that travel in 16 bits if the others travel in blocks of few bits; None: there are
    none."""
    route: str
    """``collective``, ``flat`` or ``node-first``; the same for all buckets of a bucket group."""
    updated: bool = False
    """Whether servers update the bucket's parameters, and answer with them."""
    in_order: bool = False
    """Whether servers add in the order of ranks, not of arrival."""
    node_whole: NodeSum | None = None
    """With the node-first route: the sum that every rank gets as a whole."""
    node_shards: NodeSum | None = None
    """With the node-first route and the distributed optimizer: the sum of which each rank gets its
    shard."""

    def wanted(self, elements: int) -> tuple[int, int]:
        """Return the range of the bucket's elements that this rank's optimizer owns."""
        shard = elements // len(self.owners)
        index = self.owners.index(job.rank())
        return index * shard, (index + 1) * shard

    def give_back_with(self, owner: object, grads: torch.Tensor) -> None:
        """Make the servers free the bucket's sums when every member has collected its `owner` as
        garbage. `grads`: the bucket's gradients."""
        if self.route == bytepslib.routes.COLLECTIVE or len(self.group) == 1 or not grads.numel():
            return
        names = [self.name] if self.bf16_part is None else [self.name, self.bf16_part.name_of(self)]
        bytepslib.names.Names(*names, group=self.group, owner=owner)
        for sums in (self.node_whole, self.node_shards):
            if sums is not None:
                sums.take_names(job.rank(), grads.element_size(), owner)


def wire_of(
    param_dtype: torch.dtype, grad_dtype: torch.dtype, ddp_config: DistributedDataParallelConfig
) -> WireType:
    """Return the type in which gradients travel.

    bf16 is only for fp32 gradients, because it would not shorten a half type. With the optimizer on
    the servers, parameters are pulled in the same type, so the gradients of fp32 parameters do not
    use bf16. With blocks, parameters are pulled as differences.
    """
    wire, name = bytepslib.wire, ddp_config.dpu_reduce_wire_dtype
    if name is None:
        return wire.of(grad_dtype)
    wire_type = wire.NAMES[name]
    keeps = grad_dtype != torch.float32 or (
        ddp_config.dpu_optimizer and param_dtype == torch.float32
    )
    if not wire_type.is_block and keeps:
        return wire.of(grad_dtype)
    return wire.of(grad_dtype, wire_type)


def wire_bytes(bucket: _ParamAndGradBucket, config: DistributedDataParallelConfig) -> int:
    """Return the bytes of a bucket in the busier direction: servers answer 4-bit gradients with
    8-bit differences."""
    param_dtype, elements = next(iter(bucket.params_list)).dtype, bucket.grad_data.numel()
    wire = wire_of(param_dtype, bucket.grad_data.dtype, config)
    if config.dpu_optimizer and wire.is_block:
        return max(wire.nbytes(elements), bytepslib.wire.int8().nbytes(elements))
    return wire.nbytes(elements)


# Node-first sums of a bucket whose ranks share hosts.


_Group = torch.distributed.ProcessGroup


def node_sums(
    op: BucketOp, grads: torch.Tensor, buffer: _ParamAndGradBuffer, group: _Group
) -> tuple[NodeSum, NodeSum | None]:
    """Return two sums of a bucket: of one, every rank gets the whole, and of the other, each rank
    gets its shard.

    All ranks of this host call this in the same order.

    Args:
        op: operation of the bucket. Its placement and its sums are ignored.
        grads: the bucket's gradients, flat.
        buffer: buffer of the bucket.
        group: the data-parallel group; it has the ranks of `op`.

    Returns:
        both sums. The second is None without the distributed optimizer, or if several of its
        instances share a host.
    """
    node, rank = bytepslib.nodes, job.rank()
    layout = _layout(op.group, job.joined().hosts)
    whole = node.whole_sum(
        op.name,
        layout,
        grads,
        average=buffer.ddp_config.average_in_collective,
        wire_dtype=op.wire,
        known=(buffer.data_parallel_group, group),
    )
    whole = replace(whole, in_order=op.in_order)
    if not buffer.ddp_config.use_distributed_optimizer:
        return whole, None
    shards = len(op.owners)
    owned = _owned(layout, op.group, shards)
    own_shard = owned[layout.host_of(rank)][layout.local_index(rank)]
    if op.owners[own_shard] != rank:
        raise RuntimeError(
            f"--use-dpu-reduce: rank {rank} has the place of shard {own_shard} in the "
            f"data-parallel group {op.group}, but the shards' owners are {op.owners}"
        )
    part_bytes = op.wire.nbytes(grads.numel()) // len(layout.on_host_of(rank))
    cut = bytepslib.node_groups.shard_pieces(
        grads.numel(),
        owned,
        layout.host_of(rank),
        layout.local_index(rank),
        node.piece_count(part_bytes),
    )
    if cut is None:
        # Several optimizer instances share a host. Their ranks own the same shards, so the parts
        # that the host's ranks push would overlap.
        return whole, None
    return whole, replace(whole, name=f"{op.name}/shards", pieces=tuple(cut))


@functools.lru_cache(maxsize=16)
def _layout(group: tuple[int, ...], hosts: tuple[int, ...]) -> HostLayout:
    """Return the distribution of a group over the hosts of all ranks."""
    return bytepslib.nodes.HostLayout.of(group, [str(hosts[rank]) for rank in group])


@functools.lru_cache(maxsize=16)
def _owned(layout: HostLayout, group: tuple[int, ...], shards: int) -> list[list[int]]:
    """Return, for each host, the shard that each of its ranks owns."""
    places = {rank: index for index, rank in enumerate(group)}
    return [[places[rank] % shards for rank in members] for members in layout.hosts]
