"""Trains with Megatron-LM and BytePS on a Ray cluster, and goes on when a machine is lost.

=================  ==================================================================
``settings``       settings and limits of a job, and the places of its processes
``job``            the driver: generations one after the other, until training is done
``generation``     a generation of the job: starts its processes, watches them, ends them
``recovery``       the cause of its end; scheduler and servers, over all generations
``cluster``        a Ray cluster, and in it the actors: ranks, spares, scheduler and servers
``rank_actor``     actors that own a rank's process, or a ``byteps-server`` process
``fork_server``    the process from which ranks are forked, with all modules imported
``rank_program``   the program in a rank's process, around the user's script
``memory``         training state in the memory of machines
``profiling``      profiles chosen steps of chosen ranks with torch and BytePS, in a single file
=================  ==================================================================

Each generation's ranks are new processes, so that nothing remains of a failed generation. Scheduler
and servers stay, unless they may have caused the failure. Driver and actors import neither torch
nor Megatron. The functions here send messages from a rank to its actor, one JSON object per line.
``report`` is for any script.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["report"]

_lock = threading.Lock()
_descriptor = -1
_listeners: list[Callable[[], None]] = []


def connect(descriptor: int) -> None:
    """Send all later messages to this pipe. -1: send none."""
    global _descriptor
    _descriptor = descriptor


def send(kind: str, **values: Any) -> None:
    """Send a message with the time. Does nothing in a process that no actor has started."""
    if _descriptor < 0:
        return
    line = json.dumps({"kind": kind, "time": time.time(), **values}) + "\n"
    with _lock:
        data = line.encode()
        while data:
            data = data[os.write(_descriptor, data) :]


def listen(call: Callable[[], None]) -> None:
    """Call ``call`` after each reported step."""
    _listeners.append(call)


def report(step: int, *, tokens: int = 0, **values: float) -> None:
    """Report that this rank has finished a step, from a script that does not use Megatron's loop.

    Megatron's training loop reports by itself. Other scripts call this once per step, for hang
    detection, profiling and metrics. It does nothing in processes without an actor.

    Args:
        step: number of the step, from 1.
        tokens: number of tokens of the step, over all ranks.
        values: values to show, such as ``loss``.
    """
    send(
        "step", step=int(step), tokens=int(tokens), values={k: float(v) for k, v in values.items()}
    )
    for call in _listeners:
        call()
