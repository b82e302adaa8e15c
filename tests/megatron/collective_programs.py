"""Training that records which functions of Megatron call collectives over data-parallel ranks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from tests.layouts.gpt.rank import run
from tests.megatron.rank_programs import MODEL

_PLAIN = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("all_gather_single", "all_gather_single_coalesced", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
)
"""Methods of torch's process groups that move values. Barriers and point-to-point messages are left
out: they add nothing up."""
_HELPERS = ("megatron.core.tensor_parallel.mappings", "megatron.training.cpu_platform")
"""Modules whose functions call collectives for other code."""


def train_watched(
    folder: Path, arguments: Sequence[str], environment: dict[str, str]
) -> dict[str, list[str]]:
    """Run the small model; return the functions that have called a collective over ranks with the
    same parameters, by name, with their callers."""
    seen: dict[str, list[str]] = {}
    run([*MODEL, *arguments], broken=functools.partial(_watch, seen))
    return seen


def _watch(seen: dict[str, list[str]]) -> None:
    group = dist.ProcessGroup
    for name in filter(functools.partial(hasattr, group), _PLAIN):
        setattr(group, name, _noting(getattr(group, name), seen))


def _noting(method: Callable[..., Any], seen: dict[str, list[str]]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_data_parallel(self):
            names = _callers(sys._getframe(1))
            if names and names[0] not in seen:
                seen[names[0]] = names[1:]
        return method(self, *args, **kwargs)

    return noted


def _is_data_parallel(group: Any) -> bool:
    """Return whether ranks of the group hold the same part of the model."""
    from megatron.core import mpu

    if not mpu.model_parallel_is_initialized():
        return False
    own = set(dist.get_process_group_ranks(mpu.get_data_parallel_group(with_context_parallel=True)))
    return len(own.intersection(dist.get_process_group_ranks(group))) > 1


def _callers(frame: FrameType | None) -> list[str]:
    """Return the functions of Megatron on the stack, innermost first, without helpers, as
    ``module:function``."""
    names = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("megatron.") and module not in _HELPERS:
            names.append(f"{module}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return names
