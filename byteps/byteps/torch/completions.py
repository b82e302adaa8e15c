"""What is to happen when an operation ends: called by one thread, in the order of the ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from byteps.torch import c_lib

_logger = logging.getLogger(__name__)


class Completions:
    """Calls a function for each operation that it watches, once that has ended.

    The engine queues the handles of ended operations; one thread takes them from there. So no
    thread waits for any one operation, and the engine's threads never wait for Python.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._then: dict[int, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None

    def call_at_end(self, handle: int, then: Callable[[], None]) -> bool:
        """Call `then` on the thread of completions once `synchronize(handle)` would not block.

        Args:
            handle: of an operation.
            then: must not block for long, since others wait behind it.

        Returns:
            Whether it will be called. False: the operation was synchronised already.
        """
        with self._lock:
            self._then[handle] = then
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="byteps-completions", daemon=True
                )
                self._thread.start()
        try:
            c_lib.watch(handle)
        except ValueError:
            with self._lock:
                del self._then[handle]
            return False
        return True

    def stop(self) -> None:
        """End the thread, once it has called for all operations that have ended by now."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        c_lib.wake()
        if thread is not threading.current_thread():
            thread.join()

    def forget(self) -> None:
        """In a forked process: there is no thread, and no operation is this process's."""
        self.__init__()  # type: ignore[misc]

    def _run(self) -> None:
        while handles := c_lib.await_ended():
            for handle in handles:
                with self._lock:
                    then = self._then.pop(handle, None)
                if then is None:
                    continue
                try:
                    then()
                except Exception:
                    _logger.exception("what follows a reduction failed")


completions = Completions()
"""Of this process."""
