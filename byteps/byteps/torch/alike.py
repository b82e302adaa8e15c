"""Whether tensors have the same bits on all members of a group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from byteps.torch import ops, session
from byteps.torch.ranks import Group, ranks_of

_PRIME = (1 << 31) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By bytes, the type in which a number's bits are read; longer numbers are read in halves."""


def digest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Two whole numbers below 2**31, in fp64, that change with any single number, and if two
    numbers of different size change places."""
    plain = weighted = 0
    for place, tensor in enumerate(tensors):
        flat = tensor.detach().contiguous().view(-1)
        words = flat.view(_BITS[min(4, flat.element_size())]).to(torch.int64)
        weights = torch.arange(len(words), device=words.device) % 8191 + 1
        plain += int(words.sum())
        weighted += int((words * weights).sum()) * (place + 1)
    return torch.tensor([plain % _PRIME, weighted % _PRIME], dtype=torch.float64)


def are_alike(tensors: Sequence[torch.Tensor], name: str, group: Group = None) -> bool:
    """Whether all members have the same tensors: the same answer on each of them.

    Every member calls this with the same `name`.

    Raises:
        BytePSError: a member or a server was lost.
    """
    members, mine = len(ranks_of(group)) or session.size(), digest(tensors)
    total = mine.clone()
    ops.push_pull_inplace(total, average=False, name=f"{name}/digest", group=group)
    differ = (total != mine * members).any().to(torch.float64).view(1)
    ops.push_pull_inplace(differ, average=False, name=f"{name}/differ", group=group)
    return not differ.item()
