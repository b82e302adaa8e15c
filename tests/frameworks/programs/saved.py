"""What the programs of this folder write, as any script would: parameters before and after."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def values(parameters: Iterable[Any]) -> list[torch.Tensor]:
    """Copies of whole parameters; all ranks call this where they are sharded."""
    whole = (getattr(each, "full_tensor", lambda each=each: each)() for each in parameters)
    return [each.detach().float().clone() for each in whole]


def save(before: list[torch.Tensor], after: list[torch.Tensor], path: str, steps: int) -> None:
    """Write them, by rank 0."""
    if dist.get_rank() == 0:
        torch.save({"before": before, "after": after, "steps": steps}, Path(path))
