"""Output of this folder's programs: parameters before and after training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def values(parameters: Iterable[Any]) -> list[torch.Tensor]:
    """Copy whole parameters; if they are sharded, all ranks must call this."""
    whole = (getattr(each, "full_tensor", lambda each=each: each)() for each in parameters)
    return [each.detach().float().clone() for each in whole]


def save(before: list[torch.Tensor], after: list[torch.Tensor], path: str, steps: int) -> None:
    """Write the parameters on rank 0."""
    if dist.get_rank() == 0:
        torch.save({"before": before, "after": after, "steps": steps}, Path(path))
