"""Trains with Megatron-LM and BytePS on a Ray cluster, and goes on when a machine is lost.

=================  ==================================================================
``settings``       what a job is, what it may take, and where its processes stand
``job``            the driver: generations one after the other, until training is done
``incarnation``    one life of the job: starts its processes, watches them, ends them
``recovery``       what ended it, and what the next one finds: servers, training state
``cluster``        a Ray cluster, and in it the actors: ranks, spares, scheduler and servers
``rank_actor``     actors that own a rank's process, or one of ``byteps-server``
``fork_server``    the process from which ranks are forked, all imports done
``rank_program``   what runs in the rank's process, around the user's script
``memory``         training state in the memory of actors, and a rank's as Megatron describes it
``profiling``      some steps of some ranks, as torch and BytePS see them, made one file
``dispatch``       calls to a group of ranks, without a job, and the actors of such a group
``strategies``     how such a call is cut over a mesh of ranks, and joined again
``offload``        takes a rank's state off its device between steps
=================  ==================================================================

Each generation's ranks are new processes, so that nothing of a failed one is left behind.
Scheduler and servers stay, unless the failure may have been theirs.
Driver and actors import neither torch nor Megatron. What is here tells a rank's actor what the rank
does, one JSON object a line; ``report`` is for scripts of any kind.
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
