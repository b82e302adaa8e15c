"""Children that do not outlive the process that started them."""

from __future__ import annotations

import ctypes
import signal


def end_with_parent() -> None:
    """In the child (``preexec_fn``): have the kernel terminate it when its parent is killed.

    The kernel's parent is the thread that forked, so it must live as long as the child.
    """
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
