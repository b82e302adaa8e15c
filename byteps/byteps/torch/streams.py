"""CUDA streams that only this package uses.

``torch.cuda.Stream()`` hands out the 32 streams of a pool again and again. If each all-reduce made
a stream, some would get a stream on which the program computes.
"""

from __future__ import annotations

import threading

import torch
from byteps.torch import c_lib

_made: dict[tuple[str, int], torch.cuda.Stream] = {}
_lock = threading.Lock()


def stream_for(purpose: str, device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a GPU for one purpose. The first call makes the stream; it is kept until
    the process ends.

    Args:
        purpose: name of the purpose. Work of the same purpose runs in the order of the calls.
        device: a GPU, with its number; without a number, the current GPU.
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
