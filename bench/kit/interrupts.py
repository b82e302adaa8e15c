"""What a benchmark does with Ctrl-C and its like: it takes down what it started, once."""

from __future__ import annotations

import signal
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # A second one would leave the taking down half done; it is bounded in time by itself.
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def become_interruptible() -> None:
    """Raise KeyboardInterrupt for the first of these signals, and ignore any later one.

    Also where a shell that started this in the background has Ctrl-C ignored.
    """
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
