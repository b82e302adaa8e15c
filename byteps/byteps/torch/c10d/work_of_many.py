"""All-reduces that one call has started. The native backend may run some of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from byteps.torch.c10d.work import NO_LIMIT, Work


class WorkOfMany(Work):
    """Several works as one Work."""

    def __init__(self, works: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        """`works`: works of a process group, which reduce `tensors`."""
        super().__init__(tensors)
        self._works = list(works)
        self._keep()

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait for all works, then raise the first error, if there is one."""
        errors = []
        for work in self._works:
            try:
                work.wait(timeout)
            except Exception as error:
                errors.append(error)
        self._was_awaited()
        if errors:
            raise errors[0]
        return True

    def call_when_settled(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the last work of this package is settled."""
        ours = [work for work in self._works if isinstance(work, Work)]
        settled = itertools.count(1)

        def one_settled() -> None:
            if next(settled) == len(ours):
                callback()

        for work in ours:
            work.call_when_settled(one_settled)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether no work has failed."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """Return the error of the first work that has failed; None if none has."""
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        futures = [work.get_future() for work in self._works]
        tensors = self._tensors
        return torch.futures.collect_all(futures).then(lambda done: _checked(done, tensors))


def _checked(done: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    for future in done.value():
        future.value()  # raises the exception that the future failed by
    return tensors
