"""An all-reduce of a tensor on a GPU that streams wait for, and no thread, as with NCCL."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from byteps.torch import c_lib
from byteps.torch.c10d.work import NO_LIMIT, Work
from byteps.torch.tensors import current_stream

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
