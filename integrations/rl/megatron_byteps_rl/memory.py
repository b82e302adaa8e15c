"""Peak memory of a rank's GPU, phase by phase of a step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

METRIC = "memory/peak_bytes/"
"""Before a phase's name, among the metrics of a step."""

_peaks: dict[str, int] = {}


def watch(worker: Any, phases: Mapping[str, str]) -> None:
    """Keep the peak of each call of these methods, under the phases' names.

    Nothing is kept, and the worker stays as it is, where there is no GPU. verl's own metric
    ``perf/max_memory_allocated_gb`` counts from the beginning of the phase.
    """
    if not torch.cuda.is_available():
        return
    for method, name in phases.items():
        setattr(worker, method, _watched(getattr(worker, method), name))


def _watched(method: Any, name: str) -> Any:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def later(*args: Any, **kwargs: Any) -> Any:
            with _phase(name):
                return await method(*args, **kwargs)

        return later

    @functools.wraps(method)
    def now(*args: Any, **kwargs: Any) -> Any:
        with _phase(name):
            return method(*args, **kwargs)

    return now


@contextmanager
def _phase(name: str) -> Iterator[None]:
    torch.cuda.reset_peak_memory_stats()
    yield
    _peaks[name] = max(_peaks.get(name, 0), torch.cuda.max_memory_allocated())


def peaks() -> dict[str, int]:
    """Bytes by phase: the most that torch's tensors took in this process's GPU during any call."""
    return dict(_peaks)


def most(ranks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """By phase, of the rank that took the most."""
    names = dict.fromkeys(name for one in ranks for name in one)
    return {name: max(one.get(name, 0) for one in ranks) for name in names}
