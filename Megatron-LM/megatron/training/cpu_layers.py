# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""CPU versions of layers that Megatron has only in Transformer Engine, which needs a GPU: norms
with sequence parallelism, and attention over a sequence split over context-parallel ranks.

Attention is simple and slow: each rank gathers the keys and values of the whole sequence, and
attends to them from its own tokens. A second call of :func:`allow_sequence_parallel` or
:func:`allow_context_parallel` does nothing.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import torch_norm
from megatron.core.transformer.dot_product_attention import DotProductAttention


@functools.cache
def allow_sequence_parallel() -> None:
    """Make torch's norms accept sequence parallelism.

    The norms compute the same as without it. Each rank has the gradients of its part of the
    sequence only, so they must be summed over tensor-parallel ranks. The parameters are marked for
    this sum.
    """
    make = torch_norm.WrappedTorchNorm.__new__

    def marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = make(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = marked


def positions(rank: int, size: int, length: int) -> torch.Tensor:
    """Return the sequence positions of a rank's tokens: ``length`` integers, in the rank's order.

    Megatron cuts the sequence into two chunks per rank. Each rank gets a chunk from the front and
    its mirror image from the back, because late tokens attend to more tokens.
    """
    chunk = length // 2
    front = torch.arange(chunk)
    return torch.cat([front + chunk * rank, front + chunk * (2 * size - 1 - rank)])


def whole_sequence(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather every rank's part ``[length, ...]`` in sequence order: ``[all, ...]``.

    The backward pass sums all ranks' gradients of a part on the rank that has the part.
    """
    gathered = gather_from_sequence_parallel_region(part, group=group)
    where = [positions(rank, group.size(), part.size(0)) for rank in range(group.size())]
    return gathered.index_select(0, torch.cat(where).argsort().to(part.device))


def later_tokens(length: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a mask ``[1, 1, length, all]``: true where the second token comes after this rank's
    token."""
    own = positions(group.rank(), group.size(), length)
    everyone = torch.arange(length * group.size())
    return (everyone[None, :] > own[:, None])[None, None]


@functools.cache
def allow_context_parallel() -> None:
    """Make Megatron's own attention work with context parallelism. This is only for causal models
    without a custom mask."""
    make, forward = DotProductAttention.__init__, DotProductAttention.forward

    def make_whole(self: DotProductAttention, config: Any, *args: Any, **kwargs: Any) -> None:
        undivided = copy.copy(config)
        undivided.context_parallel_size = 1
        make(self, undivided, *args, **kwargs)

    def attend(
        self: DotProductAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        group = mpu.get_context_parallel_group()
        if group.size() == 1:
            return forward(self, query, key, value, attention_mask, **kwargs)
        hidden = later_tokens(query.size(0), group).to(query.device)
        key, value = whole_sequence(key, group), whole_sequence(value, group)
        return forward(self, query, key, value, hidden, **kwargs)

    DotProductAttention.__init__, DotProductAttention.forward = make_whole, attend
