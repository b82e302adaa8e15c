# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Copies of a parameter are summed alike, so that servers update them to the same bits."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...utils import log_single_rank
from . import bytepslib

if TYPE_CHECKING:
    from ..distributed_data_parallel import DistributedDataParallel
    from .bucket_op import BucketOp

_logger = logging.getLogger(__name__)


def keep_copies_alike(
    model_chunks: Sequence[DistributedDataParallel], buffers: str, group: Any
) -> None:
    """Sum nothing inside hosts first, unless all data-parallel groups are spread over hosts alike.

    Ranks of `group` hold parts of one replica of the model. A parameter that several of them have,
    as tied embeddings are on two stages, is summed over as many data-parallel groups. If the ranks
    of a host were other members in one of these than in another, values would be added in another
    order, and the copies would drift apart. All ranks of `group` call this.

    Args:
        buffers: the attribute of a model chunk that holds its buffers.
        group: of ranks that hold the parts of the model.
    """
    if group.size() == 1:
        return
    mine = [_spread(bucket.dpu_reduce_op) for bucket in _buckets(model_chunks, buffers)]
    spreads: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(spreads, mine[0] if mine else None, group=group)
    if alike([spread for spread in spreads if spread is not None]):
        return
    log_single_rank(
        _logger,
        logging.WARNING,
        "dpu_reduce: every rank pushes whole buckets after all, since the data-parallel groups of "
        f"the model's parts are spread over hosts differently: {spreads}",
    )
    for bucket in _buckets(model_chunks, buffers):
        bucket.dpu_reduce_op = replace(
            bucket.dpu_reduce_op, route=bytepslib.routes.FLAT, node_whole=None
        )


def alike(spreads: Sequence[Sequence[int]]) -> bool:
    """Whether all groups are the same, or nobody sums inside a host first."""
    return len({tuple(spread) for spread in spreads}) <= 1


def _buckets(model_chunks: Sequence[DistributedDataParallel], buffers: str) -> Iterator[Any]:
    for chunk in model_chunks:
        for buffer in getattr(chunk, buffers):
            for bucket in buffer.buckets:
                if bucket.grad_data.numel() > 0 and bucket.dpu_reduce_op.updated:
                    yield bucket


def _spread(op: BucketOp) -> tuple[int, ...]:
    """The place among hosts of each member of the group; nothing where each pushes by itself."""
    if op.node_whole is None:
        return ()
    return tuple(op.node_whole.layout.host_of(rank) for rank in op.group)
