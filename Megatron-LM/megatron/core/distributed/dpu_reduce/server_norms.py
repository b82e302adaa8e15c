# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Norms of the gradients of a step, from the squares that servers answer with.

Megatron clips some parameters by a norm of their own, as those of multi-token prediction whose
heads are detached. Their buckets hold nothing else (see :mod:`.summed_later`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...optimizer.optimizer import GRAD_NORM_GROUP_ATTR, SEPARATE_GRAD_NORM_GROUPS

if TYPE_CHECKING:
    from byteps.torch.server_bucket import ServerBucket

_Group = torch.distributed.ProcessGroup
_NAMES = (None, *SEPARATE_GRAD_NORM_GROUPS)
"""Of the norms: None is that of all gradients that have none of their own."""


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Of one step; the same bits on every rank."""

    main: float
    """Of all gradients that have no norm of their own."""
    own: Mapping[str, float]
    """Of the groups that have."""
    zeros: int
    """Gradients that are 0, if servers count them."""

    @property
    def are_finite(self) -> bool:
        """Whether all gradients are."""
        return all(map(math.isfinite, (self.main, *self.own.values())))


def norm_group_of(bucket: ServerBucket) -> str | None:
    """The norm by which a bucket's gradients are clipped.

    Raises:
        ValueError: its parameters have different ones: they were marked after DDP was built.
    """
    names = {getattr(place.parameter, GRAD_NORM_GROUP_ATTR, None) for place in bucket.places}
    if len(names) > 1 or not names <= set(_NAMES):
        raise ValueError(
            f"--dpu-optimizer: parameters of a bucket have {GRAD_NORM_GROUP_ATTR} "
            f"{sorted(map(str, names))}. Set one of {', '.join(SEPARATE_GRAD_NORM_GROUPS)}, before "
            "the model is wrapped in DistributedDataParallel"
        )
    return names.pop()


def norms_of(
    kinds: Sequence[tuple[Sequence[ServerBucket], _Group]],
    norm_of: Mapping[ServerBucket, str | None],
    scale: float,
    device: torch.device,
) -> Norms:
    """The norms of a step that was pushed.

    Partial sums are added by fsum, which rounds once: their order does not matter, nor which
    ranks share a replica.

    Args:
        kinds: this rank's buckets, dense and expert, and for each kind the ranks that hold the
            parts of one replica of the model. All of them call this.
        norm_of: `norm_group_of` each bucket.
        scale: by which gradients will be multiplied, to undo that of the loss.
        device: of tensors that are exchanged.
    """
    parts = [part for buckets, group in kinds for part in _parts(buckets, group, norm_of, device)]
    *squares, zeros = (math.fsum(part) for part in zip(*parts, strict=True))
    main, *own = (math.sqrt(one) * scale for one in squares)
    return Norms(
        main=main, own=dict(zip(SEPARATE_GRAD_NORM_GROUPS, own, strict=True)), zeros=int(zeros)
    )


def _parts(
    buckets: Sequence[ServerBucket],
    group: _Group,
    norm_of: Mapping[ServerBucket, str | None],
    device: torch.device,
) -> list[list[float]]:
    """Of each rank of a group: the squares of each norm, and the zeros."""
    squares: dict[str | None, list[float]] = {name: [] for name in _NAMES}
    for bucket in buckets:
        squares[norm_of[bucket]] += bucket.squares
    mine = [math.fsum(squares[name]) for name in _NAMES]
    mine.append(float(sum(bucket.zeros for bucket in buckets)))
    if buckets:  # where the ranks of a host sum first, each has its parts
        mine = [math.fsum(one) for one in zip(*buckets[0].of_host(mine), strict=True)]
    if group.size() == 1:
        return [mine]
    one = torch.tensor(mine, dtype=torch.float64, device=device)
    parts = [torch.empty_like(one) for _ in range(group.size())]
    torch.distributed.all_gather(parts, one, group=group)
    return [part.tolist() for part in parts]
