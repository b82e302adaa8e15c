# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Node first: the sums of a bucket whose ranks share hosts."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from . import bytepslib, job
from .bucket_op import BucketOp

if TYPE_CHECKING:
    from byteps.torch.nodes import HostLayout, NodeSum

    from ..param_and_grad_buffer import _ParamAndGradBuffer

_Group = torch.distributed.ProcessGroup


def node_sums(
    op: BucketOp, grads: torch.Tensor, buffer: _ParamAndGradBuffer, group: _Group
) -> tuple[NodeSum, NodeSum | None]:
    """The sum of which every rank gets all, and that of which each gets the shard that it owns.

    All ranks of this host call this in the same order.

    Args:
        op: of the bucket; its placement and sums are not looked at.
        grads: the bucket's gradients, flat.
        buffer: that the bucket is a part of.
        group: the data-parallel group, of the ranks of `op`.

    Returns:
        No second one without the distributed optimizer, or where several of its instances share a
        host.
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
    part_bytes = op.wire.nbytes(grads.numel()) // len(layout.on_host_of(rank))
    cut = bytepslib.pieces.shard_pieces(
        grads.numel(),
        owned,
        layout.host_of(rank),
        layout.local_index(rank),
        node.piece_count(part_bytes),
    )
    if cut is None:
        # Several instances on one host: its ranks own the same shards, and gather more than these.
        return whole, None
    return whole, replace(whole, name=f"{op.name}/shards", pieces=tuple(cut))


@functools.lru_cache(maxsize=16)
def _layout(group: tuple[int, ...], hosts: tuple[int, ...]) -> HostLayout:
    """How a group is spread over the hosts of all ranks."""
    return bytepslib.nodes.HostLayout.of(group, [str(hosts[rank]) for rank in group])


@functools.lru_cache(maxsize=16)
def _owned(layout: HostLayout, group: tuple[int, ...], shards: int) -> list[list[int]]:
    """For each host, the shard that each of its ranks owns."""
    places = {rank: place for place, rank in enumerate(group)}
    return [[places[rank] % shards for rank in members] for members in layout.hosts]
