# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Which parts of the optimizer's state a rank saves: those that it would own in Megatron's
distributed optimizer.

A rank owns a range of each bucket, and so ranges of parameters. A checkpoint wants boxes of the
parameters' global tensors, cut anyhow, as long as they cover them once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ...dist_checkpointing.dict_utils import nested_values
from ...dist_checkpointing.mapping import (
    ReplicaId,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SavedBox:
    """Elements of a parameter that lie side by side, and are a box of a global tensor."""

    begin: int
    end: int
    place: ShardedTensor
    """Without values."""

    def holding(self, values: torch.Tensor) -> ShardedTensor:
        """With a copy of these values, of which nothing else is kept."""
        return replace(self.place, data=values.reshape(self.place.local_shape).clone())


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Offsets and sizes of the boxes that hold elements `begin` to `end`, in their order."""
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # inside one row
        for offset, size in boxes(shape[1:], begin - last * row, end - last * row):
            yield (last, *offset), (1, *size)
        return
    if begin < first * row:
        for offset, size in boxes(shape[1:], begin - (first - 1) * row, row):
            yield (first - 1, *offset), (1, *size)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < end:
        for offset, size in boxes(shape[1:], 0, end - last * row):
            yield (last, *offset), (1, *size)


def own_replica(replica: ReplicaId, copy: int = 0) -> ReplicaId:
    """Of what one rank of the data-parallel group saves, or of a further `copy` on another one:
    Megatron has this rank's number last."""
    return copy if isinstance(replica, int) else (*replica[:-1], copy)


def is_saved(model_parameter: ShardedTensor | ShardedTensorFactory) -> bool:
    """Whether ranks of this data-parallel group save it, and not those of another one."""
    return is_main_replica(own_replica(model_parameter.replica_id))


def with_values(
    model_parameter: ShardedTensor | ShardedTensorFactory,
    key: str,
    values: torch.Tensor,
    *,
    copy: int = 0,
) -> ShardedTensor | ShardedTensorFactory:
    """Fp32 values of a whole parameter, cut as the parameter is, which one rank saves; others have
    a further `copy`."""
    kind = {} if isinstance(model_parameter, ShardedTensorFactory) else {"dtype": values.dtype}
    replica = own_replica(model_parameter.replica_id, copy)
    return replace(model_parameter, key=key, data=values, replica_id=replica, **kind)


def saved_boxes(
    model_parameter: ShardedTensor | ShardedTensorFactory, key: str, begin: int, end: int
) -> list[SavedBox] | None:
    """Of elements `begin` to `end` of a parameter.

    Args:
        model_parameter: as the model's own sharded state has it.
        key: of the global tensor, or of a factory for it.

    Returns:
        None where a factory makes something else than parts of the parameter that lie side by side.
    """
    blank = torch.empty(model_parameter.data.shape, device="meta")
    whole = with_values(model_parameter, key, blank)
    parts = [whole]
    if isinstance(whole, ShardedTensorFactory):
        parts = list(nested_values([whole.build()]))
        if not all(p.data._base is blank and p.data.is_contiguous() for p in parts):
            return None
    found = []
    for part in parts:
        first = part.data.storage_offset()
        last = first + part.data.numel()
        at = max(begin, first)
        for offset, size in boxes(part.local_shape, at - first, min(end, last) - first):
            until = at + math.prod(size)
            found.append(SavedBox(begin=at, end=until, place=_boxed(part, offset, size)))
            at = until
    return found


def _boxed(part: ShardedTensor, offset: Shape, size: Shape) -> ShardedTensor:
    """A box of a part, whose neighbours may be of other sizes: there is no grid."""
    before = part.prepend_axis_num
    moves = (*(0 for _ in range(before)), *offset)
    return replace(
        part,
        data=None,
        # Megatron writes parts without a grid as they are, and so with all axes.
        local_shape=(*(1 for _ in range(before)), *size),
        prepend_axis_num=0,
        global_offset=tuple(a + b for a, b in zip(part.global_offset, moves, strict=True)),
        axis_fragmentations=None,
    )
