"""Works of torch.distributed for all-reduces through the servers. The host waits for a ServerWork;
streams wait for a StreamedWork.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from byteps.torch import c_lib, in_flight, spans
from byteps.torch.in_flight import completions
from byteps.torch.session import BytePSError
from byteps.torch.spans import Wait, leave_out_this_thread
from byteps.torch.streams import stream_for
from byteps.torch.wire import current_stream

NO_LIMIT = timedelta(0)
_WAIT = "byteps.wait all_reduce"


class Line:
    """Works that every member settles in the order in which they were started.

    To settle a work is to receive its values. That may need a collective of ranks, such as an
    all-gather inside the host. With a line these collectives come in the same order on all ranks,
    no matter which thread settles, and when. The line's thread settles works that nobody waits for.
    Each line has a thread of its own: if lines shared one, two ranks could wait for each other,
    each in another line.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._works: deque[ServerWork] = deque()
        self._ended: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, work: ServerWork) -> None:
        """Add a work that was just started, at the end of the line."""
        with self._lock:
            self._works.append(work)

    def up_to(self, work: ServerWork) -> list[ServerWork]:
        """Return the works that are settled before `work`, and `work` itself."""
        with self._lock:
            works = list(self._works)
        return works[: works.index(work) + 1] if work in works else [work]

    def settle(self, work: ServerWork) -> None:
        """Settle all works of the line up to `work`."""
        with self._lock:
            while self._works and not work.is_settled:
                self._works.popleft().settle_alone()

    def call(self, complete: Callable[[], None]) -> None:
        """Make the line's thread call `complete`, after all calls that were added before."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="byteps-line", daemon=True)
                self._thread.start()
            self._ended.put(complete)

    def stop(self, *, waits: bool) -> None:
        """End the line's thread after the calls that were added before. `waits`: return only when
        it has ended."""
        with self._starting:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._ended.put(None)
        if waits and thread is not None and thread is not threading.current_thread():
            # The wait is ended by the thread's return; deadline: that of collectives inside the
            # host.
            thread.join()

    def _run(self) -> None:
        leave_out_this_thread()
        while complete := self._ended.get():
            try:
                complete()
            except Exception:
                _logger.exception("a reduction that nobody waited for could not be completed")


_logger = logging.getLogger(__name__)

MOST_KEPT = 64
"""Number of ended works of short tensors that are kept."""
SHORT_BYTES = 64 << 10
"""Largest size of a short tensor, in bytes."""

_kept_short: dict[int, Work] = {}
_kept_long: dict[int, Work] = {}
"""Works in flight, and some ended works of short tensors, by id, oldest first. torch may hold only
the C++ object of a work, as DDP's join does with a sum of one element. It may then ask that object
whether the work has ended, and for its future. If the Python object had been collected by then, the
work would never end, and asking for the future would be an error."""


def _drop_ended(works: dict[int, Work], most: int) -> None:
    """Drop the oldest works if there are more than `most`. Stop at the first work in flight."""
    while len(works) > most:
        try:
            oldest = next(iter(works.values()))
        except (RuntimeError, StopIteration):  # another thread is dropping works
            return
        if not oldest.is_completed():
            return
        oldest.let_go()
        works.pop(id(oldest), None)


class Work(dist._Work):
    """All-reduce in place, of one tensor or several."""

    # Usual values are class attributes, so that making a work stays cheap.
    _limit_s: float | None = None
    _of = ""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """`tensors`: the tensors to reduce, which become the value of the future."""
        super().__init__()
        self._tensors = list(tensors)

    def _keep(self) -> None:
        """Keep the Python object of this work until the work ends. Constructors call this last,
        because any thread may use the work from now on."""
        is_short = all(tensor.nbytes <= SHORT_BYTES for tensor in self._tensors)
        (_kept_short if is_short else _kept_long)[id(self)] = self
        _drop_ended(_kept_short, MOST_KEPT)
        _drop_ended(_kept_long, 1)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the values are there. Subclasses define who waits: the host or a stream."""
        raise NotImplementedError

    def bound(self, limit_s: float, of: str) -> None:
        """Limit the time of `wait` to `limit_s` seconds. `of`: the setting or argument that sets
        this limit, to name in the error."""
        self._limit_s, self._of = limit_s, of

    def let_go(self) -> None:
        """Free state that otherwise only `wait` frees. Called when the work has ended and nobody
        has waited for it."""

    def call_when_settled(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, before a wait returns or the future gets its value, even if nobody
        waits. This base class calls it now, because no thread learns when a stream has the
        values."""
        callback()

    def _late(self, limit_s: float, of: str) -> str:
        tensor = self._tensors[0]
        of_type = str(tensor.dtype).removeprefix("torch.")
        return (
            f"all-reduce of {of_type} {tuple(tensor.shape)} timed out: it has not ended after "
            f"{limit_s:g} s ({of}); a member of the group has not started it, or is slow"
        )

    def _was_awaited(self) -> None:
        _kept_long.pop(id(self), None)

    def synchronize(self) -> None:
        """Wait for the values, like `wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors with the values; on a GPU, for the current stream."""
        self.wait()
        return self._tensors


class ServerWork(Work):
    """An all-reduce that the host waits for.

    The tensors must not be changed until `wait` has returned, or the future has its value. Any
    thread may call any method.
    """

    # Defaults are on the class, because a work is made for every all-reduce.
    _error: Exception | None = None
    _future: torch.futures.Future[list[torch.Tensor]] | None = None
    _given: torch.futures.Future[Any]
    _event: torch.cuda.Event | None = None
    _when_settled: Callable[[], None] | None = None
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
            tensors: the tensors to reduce, which become the value of the future.
            handles: handles of the operations that make up the all-reduce, at least one.
            receive: function that blocks until the values are there (on a GPU, for the current
                stream), and forgets the handles.
            line: line in which this work is settled, after the earlier works of the line.
        """
        super().__init__(tensors)
        self._handles = list(handles)
        self._receive = receive
        self._line = line
        self._lock = threading.RLock()
        self._completing = threading.RLock()
        if line is not None:
            line.add(self)
        self._keep()

    # ----- calls by torch.distributed

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Block until the values are there. On a GPU they are there for work that is queued on the
        current stream from now on.

        Args:
            timeout: limit of the wait; 0: the timeout of the process group. After the timeout the
                all-reduce goes on, and `wait` may be called again.

        Raises:
            BytePSError: the all-reduce failed, and the text names the peer; or the all-reduce did
                not end in time.
        """
        with Wait(_WAIT, self._tensors[0].device):
            if not self.is_settled:
                limit_s, of = self._limit_s, self._of
                if timeout > NO_LIMIT:
                    limit_s, of = timeout.total_seconds(), "the timeout of wait()"
                if limit_s is not None and not self._ends_within(limit_s):
                    raise BytePSError(self._late(limit_s, of))
            if not self.is_settled or self._event is not None:
                self._settle()
        self._was_awaited()
        if self._future is not None:  # torch expects that the future has its value now
            self._complete()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would return without blocking the host."""
        return self.is_settled or all(in_flight.has_ended(handle) for handle in self._handles)

    def is_success(self) -> bool:
        """Return True unless the all-reduce has failed, like other works of torch."""
        return self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of the all-reduce; None if it has not failed so far."""
        if not self.is_settled and self.is_completed():
            self._settle()
        return self._error

    def let_go(self) -> None:
        """Forget the operations. A work in a line is left to the line: settling it here would wait
        for other ranks, which may wait for this thread."""
        if not self.is_settled and self._line is None:
            self._settle()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of tensors. The completions' thread or the line's thread
        completes it.

        If the all-reduce fails, the future fails with a RuntimeError that quotes the BytePSError.
        """
        spans.note_unseen_waits()
        return self._own_future()

    def _own_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            made = self._future is None
            if self._future is None:
                devices = {str(t.device) for t in self._tensors if t.is_cuda}
                self._future = torch.futures.Future(devices=[*sorted(devices)])
                # If an exception were set as the future's value, C++ would take it for a value, and
                # DDP would look for tensors in it. An exception that a callback raises is an error
                # for both languages.
                self._given = self._future.then(lambda done: done.value())
            future = self._given
        # This call is made without the lock. It may settle the line, whose lock must be taken
        # before a work's lock.
        if made:
            self._complete_at_end()
        return future

    # ----- for this package

    def call_when_settled(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, before a wait returns or the future has its value."""
        with self._lock:
            if not self.is_settled:
                self._when_settled = callback
        if self._when_settled is None:
            callback()
        self.complete_by_itself()

    def complete_by_itself(self) -> None:
        """Settle this work once its operations have ended, even if nobody waits for it."""
        self._own_future()

    def ends_alone_by(self, deadline: float) -> bool:
        """Wait until the operations have ended, at most until `deadline` (a time.monotonic()), and
        return whether they have. Only the work's line calls this."""
        return self.is_settled or all(
            in_flight.await_end(handle, max(0.0, deadline - time.monotonic()))
            for handle in self._handles
        )

    def _ends_within(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        works = [self] if self._line is None else self._line.up_to(self)
        return all(work.ends_alone_by(deadline) for work in works)

    def settle_alone(self) -> None:
        """Receive the values, or record the error. Only the work's line calls this."""
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
            if self._when_settled is not None:
                self._when_settled()
            self.is_settled = True

    def _settle(self) -> None:
        if not self.is_settled:
            if self._line is None:
                self.settle_alone()
            else:
                self._line.settle(self)
        # Another thread may have settled the work, for another stream.
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
            if is_last and self._line is not None:
                self._line.call(self._complete)
            elif is_last:
                self._complete()

        for handle in self._handles:
            # An operation that has no handle any more was waited for already.
            if not completions.call_at_end(handle, one_ended):
                one_ended()

    def _complete(self) -> None:
        """Set the value of the future, unless it is set already."""
        assert self._future is not None
        self._settle()
        with self._completing:
            if self._future.done():
                return
            device = self._tensors[0].device
            stream = stream_for("completions", device) if device.type == "cuda" else None
            # The future records the work queued on this stream. A reader of the value waits for
            # that work.
            with torch.cuda.stream(stream):
                self._settle()
                self._was_awaited()
                if self._error is None:
                    self._future.set_result(self._tensors)
                else:
                    self._future.set_exception(self._error)  # type: ignore[arg-type]  # torch's stub


# Works of GPU tensors for which only streams wait, as with NCCL.


_LOOK_S = 0.001

_has_streamed = False
_landing: deque[tuple[c_lib.Landing, list[torch.Tensor]]] = deque()
"""Tensors of streamed works. They are kept until their values are there, because nobody may wait
for them."""


class StreamedWork(Work):
    """All-reduce of a tensor on a GPU for which streams wait.

    All GPU work of the all-reduce is queued when the work is made, on a stream of this module, so
    that it is done even if nobody waits. With one queue for all streams of the device
    (CUDA_DEVICE_MAX_CONNECTIONS=1), work that is queued later would wait for it, too. Then the
    first wait queues it instead.

    If the sum fails, streams go on with NaN, and the next call of the host raises BytePSError.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        land: Callable[[torch.cuda.Stream], c_lib.Landing],
        used: Sequence[torch.Tensor] = (),
    ) -> None:
        """
        Args:
            tensors: the tensor to reduce, on a GPU. This list becomes the value of the future.
            land: makes a stream wait for the values and copy them to their destination.
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
        self._keep()

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Make the current stream wait for the values. Without a timeout the host does not wait.

        Args:
            timeout: the host waits for the values, at most this long, as with NCCL. 0: the host
                goes on at once, and BYTEPS_OP_TIMEOUT_S is the limit for the stream.

        Raises:
            BytePSError: the job has failed, and the text names the peer; or the values were not
                there in time.
        """
        landed = self._queue()
        if timeout > NO_LIMIT:
            self._await_on_host(landed, timeout.total_seconds())
        with Wait(_WAIT, self._device):
            landed.wait(current_stream(self._device))
        self._was_awaited()
        c_lib.check()
        return True

    def is_completed(self) -> bool:
        """Return whether the values are there."""
        return self._queue().query()

    def is_success(self) -> bool:
        """Return True unless the job has failed, like other works of torch."""
        return not c_lib.has_failed()

    def exception(self) -> Exception | None:
        """Return the error of the job; None if it has not failed so far."""
        try:
            c_lib.check()
        except Exception as error:
            return error
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of tensors. The future has its value at once, because streams
        wait for the values, as with NCCL."""
        spans.note_unseen_waits()
        if self._future is None:
            future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(
                devices=[self._device]
            )
            # The future records the work queued on the current stream.
            stream = stream_for("futures", self._device)
            self._queue().wait(stream.cuda_stream)
            with torch.cuda.stream(stream):
                future.set_result(self._tensors)
            self._future = future
            self._was_awaited()
        return self._future

    def _await_on_host(self, landed: c_lib.Landing, limit_s: float) -> None:
        # The wait is ended by the values, the job's failure or the deadline: the caller's limit.
        deadline = time.monotonic() + limit_s
        while not landed.query():
            c_lib.check()
            if time.monotonic() > deadline:
                raise BytePSError(self._late(limit_s, "the timeout of wait()"))
            time.sleep(_LOOK_S)

    def _queue(self) -> c_lib.Landing:
        """Queue the GPU work. Return the moment at which the values are there."""
        global _has_streamed
        if self._landed is None:
            # All sums land on this stream, in the order in which they were started.
            stream = stream_for("landing", self._device)
            self._landed = self._land(stream)
            _has_streamed = True
            _let_go()
            _landing.append((self._landed, self._used))
        return self._landed


def await_all() -> None:
    """Block until all streamed works have their values.

    Raises:
        BytePSError: the job has failed. Perhaps no other call has reported this.
    """
    _kept_short.clear()
    _kept_long.clear()
    if not _has_streamed:
        return
    while _landing:
        # This loop polls, and does not wait in the driver: while NCCL waits for a lost peer, the
        # GPU's work never ends.
        while not _landing[0][0].query():
            c_lib.check()
            time.sleep(_LOOK_S)
        _landing.popleft()
    c_lib.check()


def _let_go() -> None:
    """Drop the tensors whose values are there."""
    while _landing and _landing[0][0].query():
        _landing.popleft()
