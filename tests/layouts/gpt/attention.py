"""Attention over a sequence that is split over the ranks of a context-parallel group.

Megatron leaves this to Transformer Engine, which needs a GPU; its own attention refuses. Here each
rank gathers the keys and values of the whole sequence and attends to them from its own tokens. It
is slow and plain, and the same whichever way gradients are summed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention


def positions(rank: int, size: int, length: int) -> torch.Tensor:
    """Where in the sequence the tokens of a rank lie: ``length`` integers, in the rank's order.

    Megatron cuts the sequence into twice as many chunks as ranks and gives each rank one from the
    front and its mirror image from the back: late tokens attend to more.
    """
    chunk = length // 2
    front = torch.arange(chunk)
    return torch.cat([front + chunk * rank, front + chunk * (2 * size - 1 - rank)])


def whole_sequence(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's part, ``[length, ...]``, in the order of the sequence: ``[all, ...]``.

    Going back, the gradients that all ranks have for a part are added up on its rank.
    """
    gathered = gather_from_sequence_parallel_region(part, group=group)
    where = [positions(rank, group.size(), part.size(0)) for rank in range(group.size())]
    return gathered.index_select(0, torch.cat(where).argsort().to(part.device))


def later_tokens(length: int, group: dist.ProcessGroup) -> torch.Tensor:
    """True where a token of this rank must not look, as it comes later: ``[1, 1, length, all]``."""
    mine = positions(group.rank(), group.size(), length)
    everyone = torch.arange(length * group.size())
    return (everyone[None, :] > mine[:, None])[None, None]


def allow_context_parallel() -> None:
    """Have Megatron's plain attention do so. For causal models without a mask of their own."""
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
        hidden = later_tokens(query.size(0), group).to(query.device)
        key, value = whole_sequence(key, group), whole_sequence(value, group)
        return forward(self, query, key, value, hidden, **kwargs)

    DotProductAttention.__init__, DotProductAttention.forward = make_whole, attend
