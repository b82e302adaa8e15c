"""CUDA streams that belong to this package alone.

``torch.cuda.Stream()`` reuses the 32 streams of a pool: if each all-reduce made a stream,
it would soon get one on which the program computes.
"""

from __future__ import annotations

import threading

import torch
from byteps.torch import c_lib

_made: dict[tuple[str, int], torch.cuda.Stream] = {}
_lock = threading.Lock()


def stream_for(purpose: str, device: torch.device) -> torch.cuda.Stream:
    """The stream of a GPU for one purpose: made by the first who asks, kept to the end.

    Args:
        purpose: what is queued there, whose order is then the order of calls.
        device: a GPU, with its number or the current one.
    """
    number = torch.cuda.current_device() if device.index is None else device.index
    stream = _made.get((purpose, number))
    if stream is None:
        with _lock:
            stream = _made.get((purpose, number))
            if stream is None:
                where = torch.device("cuda", number)
                stream = torch.cuda.ExternalStream(c_lib.make_stream(number), device=where)
                _made[purpose, number] = stream
    return stream
