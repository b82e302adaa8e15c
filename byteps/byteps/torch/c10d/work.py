"""An all-reduce through the servers in flight, as torch.distributed has it: awaited or streamed."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from byteps.torch import c_lib, operations
from byteps.torch.in_flight import completions
from byteps.torch.wire import current_stream

NO_LIMIT = timedelta(0)


class Line:
    """Works that every member settles in the order in which they were started.

    What a work needs of other ranks when it is settled, such as an all-gather inside the host,
    then comes in the same order on all of them, whichever thread settles and whenever.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._works: deque[ServerWork] = deque()

    def add(self, work: ServerWork) -> None:
        """Put a work that was just started at the end."""
        with self._lock:
            self._works.append(work)

    def settle(self, work: ServerWork) -> None:
        """Settle all works up to this one."""
        with self._lock:
            while self._works and not work.is_settled:
                self._works.popleft().settle_alone()


class Work(dist._Work):
    """The all-reduce of one tensor, in place."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """`tensors`: what the future's value will be: the one tensor."""
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the values are there, in the sense of the subclass."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors, with the values; on a GPU, for the current stream."""
        self.wait()
        return self._tensors


class ServerWork(Work):
    """An all-reduce that the host waits for.

    The tensor must not be changed until `wait` has returned, or the future has its value. Any
    thread may call anything.
    """

    # Of the class as long as they are the usual ones: a work is made for every all-reduce.
    _error: Exception | None = None
    _future: torch.futures.Future[list[torch.Tensor]] | None = None
    _given: torch.futures.Future[Any]
    _event: torch.cuda.Event | None = None
    is_settled = False

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        handles: Sequence[int],
        receive: Callable[[], object],
        line: Line | None = None,
    ) -> None:
        """
        Args:
            tensors: what the future's value will be.
            handles: of the operations that it is made of; one at least.
            receive: blocks until the values are there, on a GPU for the current stream; it forgets
                the handles.
            line: in which others are settled before it.
        """
        super().__init__(tensors)
        self._handles = list(handles)
        self._receive = receive
        self._line = line
        self._lock = threading.RLock()
        if line is not None:
            line.add(self)

    # ----- as torch.distributed calls it

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Block until the values are there; on a GPU, for the current stream's work from now on.

        Args:
            timeout: not looked at: BYTEPS_OP_TIMEOUT_S is the limit.

        Raises:
            BytePSError: the all-reduce failed; the text names the peer.
        """
        del timeout
        if not self.is_settled or self._event is not None:
            self._settle()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would not block the host."""
        return self.is_settled or all(operations.has_ended(handle) for handle in self._handles)

    def is_success(self) -> bool:
        """Whether it was waited for, and did not fail."""
        return self.is_settled and self._error is None

    def exception(self) -> Exception | None:
        """Why it failed; None as long as it did not."""
        return self._error

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of tensors. It is completed by the thread of completions.

        Where the all-reduce fails, the future does by a RuntimeError that quotes the BytePSError.
        """
        with self._lock:
            made = self._future is None
            if self._future is None:
                devices = {str(t.device) for t in self._tensors if t.is_cuda}
                self._future = torch.futures.Future(devices=[*sorted(devices)])
                # An exception that is set is a value to C++, where DDP looks for tensors in it. One
                # that a callback raises is an error to all.
                self._given = self._future.then(lambda done: done.value())
            future = self._given
        # Without the lock: it may settle the line, whose lock comes before that of a work.
        if made:
            self._complete_at_end()
        return future

    # ----- for this package

    def complete_by_itself(self) -> None:
        """Settle it once it has ended, whether or not anybody waits for it."""
        self.get_future()

    def settle_alone(self) -> None:
        """Receive the values, or learn why there are none. Only for the line that it is in."""
        with self._lock:
            if self.is_settled:
                return
            try:
                self._receive()
            except Exception as error:
                self._error = error
            if self._tensors[0].is_cuda and self._error is None:
                self._event = torch.cuda.Event()
                self._event.record(torch.cuda.current_stream(self._tensors[0].device))
            self.is_settled = True

    def _settle(self) -> None:
        if not self.is_settled:
            if self._line is None:
                self.settle_alone()
            else:
                self._line.settle(self)
        # Another thread may have settled it, for another stream.
        if self._event is not None:
            torch.cuda.current_stream(self._tensors[0].device).wait_event(self._event)

    def _complete_at_end(self) -> None:
        """Complete the future when the last operation has ended."""
        left = len(self._handles)
        counting = threading.Lock()

        def one_ended() -> None:
            nonlocal left
            with counting:
                left -= 1
                is_last = left == 0
            if is_last:
                self._complete()

        for handle in self._handles:
            if not completions.call_at_end(handle, one_ended):  # waited for already
                one_ended()

    def _complete(self) -> None:
        assert self._future is not None
        device = self._tensors[0].device
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # The future remembers what its stream has been given, for those who wait for it.
        with torch.cuda.stream(stream):
            self._settle()
            if self._error is None:
                self._future.set_result(self._tensors)
            else:
                self._future.set_exception(self._error)  # type: ignore[arg-type]  # torch's stub


class WorkOfMany(dist._Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        """`works`: of a process group, for `tensors`."""
        super().__init__()
        self._works = list(works)
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait for all, and then raise the first error, if there is one."""
        errors = []
        for work in self._works:
            try:
                work.wait(timeout)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors, with the values."""
        self.wait()
        return self._tensors

    def is_completed(self) -> bool:
        """Whether all are."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all are."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """The first one's that has one."""
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of tensors."""
        futures = [work.get_future() for work in self._works]
        tensors = self._tensors
        return torch.futures.collect_all(futures).then(lambda done: _checked(done, tensors))


def _checked(done: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    for future in done.value():
        future.value()  # raises what it failed by
    return tensors


# Of a tensor on a GPU: streams wait for it, and no thread, as with NCCL.


_LOOK_S = 0.001

_streams: dict[torch.device, torch.cuda.Stream] = {}
"""On which sums land, in the order in which they were started."""
_landing: deque[tuple[c_lib.Landing, list[torch.Tensor]]] = deque()
"""Tensors of works that nobody may have waited for, until they have landed."""


class StreamedWork(Work):
    """An all-reduce of a tensor on a GPU that streams wait for.

    All that is to happen on the GPU is queued on a stream of this module's when the work is made,
    so that it happens whether or not anybody waits. Where streams share one queue of the device
    (CUDA_DEVICE_MAX_CONNECTIONS=1) it is queued by the first who waits: all that comes behind it
    would wait too.

    Where the sum fails, streams go on with NaN, and the next call of the host raises BytePSError.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        land: Callable[[torch.cuda.Stream], c_lib.Landing],
        used: Sequence[torch.Tensor] = (),
    ) -> None:
        """
        Args:
            tensors: what the future's value will be: one, on a GPU.
            land: has a stream wait for the values, and put them where they belong.
            used: other tensors that `land` uses.
        """
        super().__init__(tensors)
        self._used = [*self._tensors, *used]
        self._land = land
        self._device = self._tensors[0].device
        self._landed: c_lib.Landing | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
            self._queue()

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Have the current stream wait for the values. The host goes on at once.

        Args:
            timeout: not looked at: BYTEPS_OP_TIMEOUT_S is the limit.

        Raises:
            BytePSError: the job has failed; the text names the peer.
        """
        del timeout
        self._queue().wait(current_stream(self._device))
        c_lib.check()
        return True

    def is_completed(self) -> bool:
        """Whether the values are there."""
        return self._queue().query()

    def is_success(self) -> bool:
        """Whether they are, and the job has not failed."""
        return self.is_completed() and not c_lib.has_failed()

    def exception(self) -> Exception | None:
        """Why the job has failed; None as long as it has not."""
        try:
            c_lib.check()
        except Exception as error:
            return error
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of tensors that has its value: streams wait, as for NCCL's."""
        if self._future is None:
            future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(
                devices=[self._device]
            )
            # It takes note of what the current stream has been given.
            stream = torch.cuda.Stream(self._device)
            self._queue().wait(stream.cuda_stream)
            with torch.cuda.stream(stream):
                future.set_result(self._tensors)
            self._future = future
        return self._future

    def _queue(self) -> c_lib.Landing:
        """The moment at which the values are there."""
        if self._landed is None:
            stream = _streams.get(self._device)
            if stream is None:
                stream = _streams[self._device] = torch.cuda.Stream(self._device)
            self._landed = self._land(stream)
            _let_go()
            _landing.append((self._landed, self._used))
        return self._landed


def await_all() -> None:
    """Block until all that was queued has landed.

    Raises:
        BytePSError: the job has failed, of which nobody may have heard.
    """
    if not _streams:
        return
    while _landing:
        # Not in the driver: the GPU's work never ends where a peer was lost that NCCL waits for.
        while not _landing[0][0].query():
            c_lib.check()
            time.sleep(_LOOK_S)
        _landing.popleft()
    c_lib.check()


def _let_go() -> None:
    """Of tensors that have landed."""
    while _landing and _landing[0][0].query():
        _landing.popleft()
