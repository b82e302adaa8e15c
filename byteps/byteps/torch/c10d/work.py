"""An all-reduce through the servers in flight, as torch.distributed has it: awaited or streamed."""

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

    What a work needs of other ranks when it is settled, such as an all-gather inside the host,
    then comes in the same order on all of them, whichever thread settles and whenever. Works that
    nobody waits for are settled by a thread of the line: where one thread did so for several lines,
    two ranks could wait for each other, each in another line.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._works: deque[ServerWork] = deque()
        self._ended: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, work: ServerWork) -> None:
        """Put a work that was just started at the end."""
        with self._lock:
            self._works.append(work)

    def up_to(self, work: ServerWork) -> list[ServerWork]:
        """The works that are settled before this one, and itself."""
        with self._lock:
            works = list(self._works)
        return works[: works.index(work) + 1] if work in works else [work]

    def settle(self, work: ServerWork) -> None:
        """Settle all works up to this one."""
        with self._lock:
            while self._works and not work.is_settled:
                self._works.popleft().settle_alone()

    def call(self, complete: Callable[[], None]) -> None:
        """Have the line's thread call this, after what it was given before."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="byteps-line", daemon=True)
                self._thread.start()
            self._ended.put(complete)

    def stop(self, *, waits: bool) -> None:
        """End the thread after all that it was given. `waits`: until then."""
        with self._starting:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._ended.put(None)
        if waits and thread is not None and thread is not threading.current_thread():
            # Ended by the end of its thread; deadline: that of collectives inside the host.
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
"""Works of short tensors that have ended and are kept nevertheless."""
SHORT_BYTES = 64 << 10
"""Length of the longest tensors whose works are kept after their end."""

_kept_short: dict[int, Work] = {}
_kept_long: dict[int, Work] = {}
"""Works in flight, by their ids, oldest first, and of short tensors some that have ended. torch may
hold the C++ half of a work alone, as DDP's join does with a sum of one element, and ask it for its
end and then for its future: without this half, which would be collected, the one never comes and
the other is an error."""


def _drop_ended(kept: dict[int, Work], most: int) -> None:
    """Let go of the oldest works beyond this number, up to the first that is in flight."""
    while len(kept) > most:
        try:
            oldest = next(iter(kept.values()))
        except (RuntimeError, StopIteration):  # another thread is here
            return
        if not oldest.is_completed():
            return
        oldest.let_go()
        kept.pop(id(oldest), None)


class Work(dist._Work):
    """The all-reduce of a tensor, or of several, in place."""

    # Class attributes for the usual values, since a work is made for every all-reduce.
    _limit_s: float | None = None
    _of = ""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """`tensors`: what the future's value will be."""
        super().__init__()
        self._tensors = list(tensors)

    def _keep(self) -> None:
        """Keep this half of the work until its end. The last step of making one: any thread may
        ask it from now on."""
        is_short = all(tensor.nbytes <= SHORT_BYTES for tensor in self._tensors)
        (_kept_short if is_short else _kept_long)[id(self)] = self
        _drop_ended(_kept_short, MOST_KEPT)
        _drop_ended(_kept_long, 1)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the values are there, in the sense of the subclass."""
        raise NotImplementedError

    def bound(self, limit_s: float, of: str) -> None:
        """Have `wait` take no longer than this. `of`: what sets the limit, for the error."""
        self._limit_s, self._of = limit_s, of

    def let_go(self) -> None:
        """It has ended, and nobody seems to want it: free what only a wait would."""

    def call_when_settled(self, callback: Callable[[], None]) -> None:
        """Call this once, before a wait returns or the future has its value, even if nobody waits.
        Here, where no thread learns when streams get there: now."""
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
        """The tensors, with the values; on a GPU, for the current stream."""
        self.wait()
        return self._tensors


class ServerWork(Work):
    """An all-reduce that the host waits for.

    The tensor must not be changed until `wait` has returned, or the future has its value. Any
    thread may call anything.
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
        self._completing = threading.RLock()
        if line is not None:
            line.add(self)
        self._keep()

    # ----- calls by torch.distributed

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Block until the values are there; on a GPU, for the current stream's work from now on.

        Args:
            timeout: how long; 0: as long as the process group's operations may take. After that
                the all-reduce goes on, and may be waited for again.

        Raises:
            BytePSError: the all-reduce failed, and the text names the peer; or it did not end in
                time.
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
        if self._future is not None:  # torch expects a value in it now
            self._complete()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would not block the host."""
        return self.is_settled or all(in_flight.has_ended(handle) for handle in self._handles)

    def is_success(self) -> bool:
        """Whether it did not fail, by now: as torch's works say it."""
        return self.exception() is None

    def exception(self) -> Exception | None:
        """Why it failed; None as long as it did not."""
        if not self.is_settled and self.is_completed():
            self._settle()
        return self._error

    def let_go(self) -> None:
        """Forget the operations. A work in a line has been settled by itself, or will be: here it
        would wait for other ranks, which may wait for this thread."""
        if not self.is_settled and self._line is None:
            self._settle()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of tensors. The thread of completions completes it, or the line's.

        Where the all-reduce fails, the future does by a RuntimeError that quotes the BytePSError.
        """
        spans.note_unseen_waits()
        return self._own_future()

    def _own_future(self) -> torch.futures.Future[Any]:
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

    def call_when_settled(self, callback: Callable[[], None]) -> None:
        """Call this once, before a wait returns or the future has its value."""
        with self._lock:
            if not self.is_settled:
                self._when_settled = callback
        if self._when_settled is None:
            callback()
        self.complete_by_itself()

    def complete_by_itself(self) -> None:
        """Settle it once it has ended, whether or not anybody waits for it."""
        self._own_future()

    def ends_alone_by(self, deadline: float) -> bool:
        """Whether its operations ended by then, of time.monotonic(). Only for its line."""
        return self.is_settled or all(
            in_flight.await_end(handle, max(0.0, deadline - time.monotonic()))
            for handle in self._handles
        )

    def _ends_within(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        works = [self] if self._line is None else self._line.up_to(self)
        return all(work.ends_alone_by(deadline) for work in works)

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
            if self._when_settled is not None:
                self._when_settled()
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
            if is_last and self._line is not None:
                self._line.call(self._complete)
            elif is_last:
                self._complete()

        for handle in self._handles:
            if not completions.call_at_end(handle, one_ended):  # waited for already
                one_ended()

    def _complete(self) -> None:
        """Give the future its value, if it has none yet; it has one afterwards."""
        assert self._future is not None
        self._settle()
        with self._completing:
            if self._future.done():
                return
            device = self._tensors[0].device
            stream = stream_for("completions", device) if device.type == "cuda" else None
            # The future remembers what its stream has been given, for those who wait for it.
            with torch.cuda.stream(stream):
                self._settle()
                self._was_awaited()
                if self._error is None:
                    self._future.set_result(self._tensors)
                else:
                    self._future.set_exception(self._error)  # type: ignore[arg-type]  # torch's stub


# A work of a GPU tensor: streams wait for it, and no thread does, like with NCCL.


_LOOK_S = 0.001

_has_streamed = False
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
        self._keep()

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Have the current stream wait for the values. The host goes on at once.

        Args:
            timeout: how long the host waits for the values, as with NCCL; 0: it goes on at once,
                and BYTEPS_OP_TIMEOUT_S is the limit.

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
        """Whether the values are there."""
        return self._queue().query()

    def is_success(self) -> bool:
        """Whether the job has not failed, by now: as torch's works say it."""
        return not c_lib.has_failed()

    def exception(self) -> Exception | None:
        """Why the job has failed; None as long as it has not."""
        try:
            c_lib.check()
        except Exception as error:
            return error
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of tensors that has its value: streams wait, as for NCCL's."""
        spans.note_unseen_waits()
        if self._future is None:
            future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(
                devices=[self._device]
            )
            # It takes note of what the current stream has been given.
            stream = stream_for("futures", self._device)
            self._queue().wait(stream.cuda_stream)
            with torch.cuda.stream(stream):
                future.set_result(self._tensors)
            self._future = future
            self._was_awaited()
        return self._future

    def _await_on_host(self, landed: c_lib.Landing, limit_s: float) -> None:
        # Ended by the values, the job's failure or the deadline: the caller's limit.
        deadline = time.monotonic() + limit_s
        while not landed.query():
            c_lib.check()
            if time.monotonic() > deadline:
                raise BytePSError(self._late(limit_s, "the timeout of wait()"))
            time.sleep(_LOOK_S)

    def _queue(self) -> c_lib.Landing:
        """The moment at which the values are there."""
        global _has_streamed
        if self._landed is None:
            # On which sums land, in the order in which they were started.
            stream = stream_for("landing", self._device)
            self._landed = self._land(stream)
            _has_streamed = True
            _let_go()
            _landing.append((self._landed, self._used))
        return self._landed


def await_all() -> None:
    """Block until all that was queued has landed.

    Raises:
        BytePSError: the job has failed, of which nobody may have heard.
    """
    _kept_short.clear()
    _kept_long.clear()
    if not _has_streamed:
        return
    while _landing:
        # Not in the driver: the GPU's work never ends where a peer was lost that NCCL waits for.
        while not _landing[0][0].query():
            c_lib.check()
            time.sleep(_LOOK_S)
        _landing.popleft()
    c_lib.check()


def _let_go() -> None:
    """A work of tensors that have landed."""
    while _landing and _landing[0][0].query():
        _landing.popleft()
