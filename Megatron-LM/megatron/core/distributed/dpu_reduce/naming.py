# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Names and placements of buckets: pure functions of what identifies them."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from dataclasses import dataclass, field

import torch

_DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "uint8",
}


@functools.lru_cache(maxsize=64)
def group_name(group: tuple[int, ...]) -> str:
    """A name of all ranks of a group: its lowest rank, its size, and a digest of the others.

    It depends on nothing else, so that all members find the same, and each group has its own.
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
    """The key of a bucket: a pure function of what identifies it.

    Every rank of a data-parallel group computes the same name and no two groups of a job share
    one, whatever the order in which ranks build or sum their buckets, and whatever else some of
    them build.

    Args:
        kind: ``dense`` or ``expert``, the kind of the data-parallel group.
        group: the global ranks of the group.
        model: how many models with this kind, group and chunk the process wrapped before this one.
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
    """What this process has named so far.

    All counts are by group: the members of a group build the same models for it in the same order,
    but a member may build others for other groups in between.
    """

    models: Counter[tuple[str, tuple[int, ...], int]] = field(default_factory=Counter)
    """Models by kind of group, group, and chunk."""
    partitions: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Partitions of all buckets of a group: the next place in the round robin over the servers."""

    def clear(self) -> None:
        self.models.clear()
        self.partitions.clear()

    def next_model(self, kind: str, group: tuple[int, ...], chunk: int) -> int:
        """How many models there were with these before; count one more."""
        key = (kind, tuple(sorted(group)), chunk)
        self.models[key] += 1
        return self.models[key] - 1

    def next_placement(self, group: tuple[int, ...], partitions: int) -> int:
        """The place of so many partitions of a sum over a group.

        Groups, of which each counts its own partitions, begin at different servers.
        """
        key = tuple(sorted(group))
        place = self.partitions[key] + key[0]
        self.partitions[key] += partitions
        return place


named = Named()
"""Of this process."""
