"""Names for profilers, and the time that a program waits for servers.

torch.profiler shows a span as an event, Nsight Systems as an NVTX range. Without a profiler a span
costs one microsecond of CPU time, a wait three.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from types import TracebackType

import torch
from torch._C._profiler import _RecordFunctionFast

_nvtx = getattr(torch._C, "_nvtx", None)
"""torch's calls of NVTX; None if torch was built without CUDA."""


class Span:
    """Context that profilers show by its name. Each object is entered once."""

    __slots__ = ("_event", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._event = _RecordFunctionFast(name)

    def __enter__(self) -> None:
        if _nvtx is not None:
            _nvtx.rangePushA(self._name)
        self._event.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._event.__exit__(kind, error, trace)
        if _nvtx is not None:
            _nvtx.rangePop()


class _Exposed:
    """Adds up the time of this process's waits.

    On the CPU, the time of a wait is the time in which the thread was blocked. On a GPU, it is the
    time in which the waiting stream had nothing to do, because the host may wait while the GPU
    still computes.
    """

    _OPEN = 32
    """Limit of open event pairs. At this number, finished pairs are added up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ns = 0
        self._gpu_ms = 0.0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []
        self.is_whole = True
        """Whether all waits are known. False once a future was handed out, because waits for a
        future are not seen."""

    def seconds(self) -> float:
        """Return the time of all waits that have ended, in seconds."""
        with self._lock:
            self._add_ended()
            return self._ns * 1e-9 + self._gpu_ms * 1e-3

    def add(self, nanoseconds: int) -> None:
        """Add the time in which a thread was blocked."""
        with self._lock:
            self._ns += nanoseconds

    def mark(self, device: torch.device) -> torch.cuda.Event:
        """Record an event with a time in the current stream of a GPU; return it."""
        with self._lock:
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def add_between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Add the time between two events of a stream that has waited."""
        with self._lock:
            self._open.append((begin, end))
            if len(self._open) >= self._OPEN:
                self._add_ended()

    def _add_ended(self) -> None:
        while self._open and self._open[0][1].query():
            begin, end = self._open.popleft()
            self._gpu_ms += begin.elapsed_time(end)
            self._free += begin, end


_exposed = _Exposed()


def exposed_seconds() -> float | None:
    """Return the seconds in which threads of this process, or its GPUs' streams, have waited.

    Return None if a future was handed out: waits for a future, such as those of torch's DDP, are
    not seen.
    """
    return _exposed.seconds() if _exposed.is_whole else None


def note_unseen_waits() -> None:
    """Note that a future was handed out. Waits for the future are not seen."""
    _exposed.is_whole = False


class _Thread(threading.local):
    waits = False
    """Whether this thread is inside a wait."""
    is_background = False


_thread = _Thread()


def leave_out_this_thread() -> None:
    """Leave out the waits of this thread, because the program does not wait for this thread."""
    _thread.is_background = True


class Wait(Span):
    """Span in which this thread waits for servers. Nested waits count once.

    The time of a wait is exposed, which means that no computation of the program hides it.
    """

    __slots__ = ("_began", "_device", "_mark")

    def __init__(self, name: str, device: torch.device) -> None:
        """`device`: device of the tensor that is waited for."""
        super().__init__(name)
        self._device = device
        self._began = 0
        self._mark: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        super().__enter__()
        if _thread.waits or _thread.is_background:
            return
        _thread.waits = True
        if self._device.type == "cuda":
            self._mark = _exposed.mark(self._device)
        self._began = time.perf_counter_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._began:
            _thread.waits = False
            if self._mark is None:
                _exposed.add(time.perf_counter_ns() - self._began)
            elif error is None:
                _exposed.add_between(self._mark, _exposed.mark(self._device))
        super().__exit__(kind, error, trace)
