"""Why a worker's process ends, for the others to know."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

_TEXT_CHARS = 500
"""Of an exception, for the other nodes to read."""


def reason(error: BaseException | None) -> str:
    """What is told of a process that ends by this exception; empty if it ends well."""
    if error is None:
        return ""
    if isinstance(error, SystemExit):
        # As the interpreter does: a text is printed, and is a failure.
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        return of_status(status)
    return traceback.format_exception_only(error)[-1].strip()[:_TEXT_CHARS]


def of_status(status: int) -> str:
    """What is told of a process that ends with this exit status; empty for 0."""
    return f"exit status {status}" if status != 0 else ""


def last_error() -> BaseException | None:
    """The exception that nobody caught and that ends the interpreter, if it does. SystemExit is
    none of these."""
    if hasattr(sys, "ps1"):  # at a prompt life goes on
        return None
    return getattr(sys, "last_exc", None)


def on_abrupt_exit(leave: Callable[[str], None]) -> None:
    """Call ``leave(reason)`` if the process ends by os._exit() after Python's exit handlers,
    as one does that multiprocessing forked: the C library's handlers are not called then."""
    end_now = os._exit
    worker = os.getpid()

    def leave_and_exit(status: int) -> NoReturn:
        if os.getpid() == worker:
            leave(of_status(status))
        end_now(status)

    os._exit = leave_and_exit
