"""Events that a profiler shows for all-reduces through the servers, as for native ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd.profiler import record_function


class Event:
    """An asynchronous event: it begins on one thread, and ends on another one.

    It has no shapes, since torch takes them from Python for events of one thread alone.
    """

    def __init__(self, name: str) -> None:
        """Begin it now, on this thread."""
        self._began_on = threading.get_ident()
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        self._lock = threading.Lock()
        with record_function(name) as event:
            event._call_end_callbacks_on_future(self._ended)

    def end(self) -> None:
        """End it, whichever thread this is. Again: do nothing."""
        with self._lock:
            if self._ended.done():
                return
            if threading.get_ident() != self._began_on:
                self._ended.set_result(None)
                return
            thread = threading.Thread(target=self._ended.set_result, args=(None,))
            thread.start()
            # Ended by the callbacks of the result, which wait for nothing; deadline: none.
            thread.join()


def record(
    call: str, operation: str, tensors: Sequence[torch.Tensor], start: Callable[[], Any]
) -> Any:
    """Start an operation on tensors; record the call, and how long the operation is in flight.

    Args:
        call: torch's name of the call, whose event has the shapes of the tensors.
        operation: the native backend's name of the operation.
        start: returns the work.
    """
    with _RecordFunctionFast(call, list(tensors), {}):
        event = Event(operation)
        try:
            work = start()
        except BaseException:
            event.end()
            raise
        work.call_when_settled(event.end)
        return work
