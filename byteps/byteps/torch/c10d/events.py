"""Events that a profiler shows for all-reduces through the servers, like those of native ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd.profiler import record_function


class Event:
    """Asynchronous event for a profiler. It may begin on one thread and end on another one.

    The event has no shapes, because from Python torch takes shapes only for events of a single
    thread.
    """

    def __init__(self, name: str) -> None:
        """Begin the event now, on this thread."""
        self._began_on = threading.get_ident()
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        self._lock = threading.Lock()
        with record_function(name) as event:
            event._call_end_callbacks_on_future(self._ended)

    def end(self) -> None:
        """End the event; any thread may call this. A second call does nothing."""
        with self._lock:
            if self._ended.done():
                return
            if threading.get_ident() != self._began_on:
                self._ended.set_result(None)
                return
            thread = threading.Thread(target=self._ended.set_result, args=(None,))
            thread.start()
            # The wait is ended by the result's callbacks, which wait for nothing; deadline: none.
            thread.join()


def record(
    call: str, operation: str, tensors: Sequence[torch.Tensor], start: Callable[[], Any]
) -> Any:
    """Start an operation on tensors, and return its work. A profiler gets an event for the call,
    and another one for the time in which the operation is in flight.

    Args:
        call: torch's name of the call, whose event has the shapes of the tensors.
        operation: the native backend's name of the operation.
        start: starts the operation and returns its work.
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
