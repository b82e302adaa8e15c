"""What a rank's process tells its actor, one JSON object a line."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

_lock = threading.Lock()
_descriptor = -1
_listeners: list[Callable[[], None]] = []


def connect(descriptor: int) -> None:
    """Send what follows to this pipe; -1: nowhere."""
    global _descriptor
    _descriptor = descriptor


def send(kind: str, **values: Any) -> None:
    """Send one message with the time; does nothing in a process that no actor started."""
    if _descriptor < 0:
        return
    line = json.dumps({"kind": kind, "time": time.time(), **values}) + "\n"
    with _lock:
        data = line.encode()
        while data:
            data = data[os.write(_descriptor, data) :]


def listen(call: Callable[[], None]) -> None:
    """Have ``call`` called after each step that is reported."""
    _listeners.append(call)


def report(step: int, *, tokens: int = 0, **values: float) -> None:
    """Say that this rank has finished a step, from a script that is not Megatron's.

    Megatron's training loop is watched by itself. Any other script that wants to be watched for
    hangs, profiled, and shown in the metrics, calls this once a step. Otherwise it does nothing.

    Args:
        step: number of the step, from 1.
        tokens: tokens of the step over all ranks.
        values: what to show, such as ``loss``.
    """
    send(
        "step", step=int(step), tokens=int(tokens), values={k: float(v) for k, v in values.items()}
    )
    for call in _listeners:
        call()
