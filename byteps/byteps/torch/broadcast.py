"""Copies values of one rank to all: tensors, parameters, an optimizer's whole state, any object.

Values travel as the bytes of a sum to which every other rank adds zeros, so they arrive bit for
bit.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from byteps.torch import ops
from byteps.torch.session import BytePSError
from byteps.torch.wire import flat_view

__all__ = ["broadcast", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]

_Named = tuple[str, Any]


def broadcast(tensor: torch.Tensor, root_rank: int, name: str) -> torch.Tensor:
    """Give every rank the values that the tensor has on `root_rank`, in place; return the tensor.

    Blocks until all ranks have called it.

    Args:
        tensor: dense, of any type, shape and memory format, the same on all ranks.
        root_rank: the rank that has the values.
        name: identifies the tensor; the same on all ranks, different for each tensor.

    Raises:
        ValueError: `root_rank` is no rank of the job, or the tensor is sparse or has gaps.
        BytePSError: the job failed, or ranks disagree about the tensor.
    """
    _check_root(root_rank)
    if tensor.numel() == 0:
        return tensor
    flat = flat_view(tensor, "the tensor").view(torch.uint8)
    with torch.no_grad():
        if ops.rank() != root_rank:
            flat.zero_()
        ops.push_pull_inplace(flat, average=False, name=name)
    return tensor


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[torch.Tensor | _Named],
    root_rank: int,
    prefix: str = "Parameter.",
) -> None:
    """Give every rank the values that tensors have on `root_rank`.

    Args:
        params: ``model.state_dict()``, ``model.parameters()``, ``model.named_parameters()``, or a
            list of either; in the same order on all ranks. Values that are no tensors are skipped.
        root_rank: the rank that has the values.
        prefix: the first part of each tensor's name.

    Raises:
        ValueError: `root_rank` is no rank of the job, or a tensor is sparse or has gaps.
        BytePSError: the job failed, or ranks disagree about a tensor.
    """
    _check_root(root_rank)
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    for index, pair in enumerate(pairs):
        name, tensor = pair if isinstance(pair, tuple) else (str(index), pair)
        if isinstance(tensor, torch.Tensor):
            broadcast(tensor, root_rank, f"{prefix}{name}")


def broadcast_object(value: Any, root_rank: int, name: str = "object") -> Any:
    """Return on every rank a copy of the object that `root_rank` has.

    The object is pickled, so every rank must trust the root. Blocks until all ranks have called
    this function.

    Raises:
        ValueError: `root_rank` is no rank of the job.
        BytePSError: the job failed.
    """
    content = pickle.dumps(value) if ops.rank() == root_rank else b""
    return pickle.loads(_content_of(content, root_rank, name))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, prefix: str = "Parameter."
) -> None:
    """Give every rank the state and the options that the optimizer has on `root_rank`.

    Blocks until all ranks have called it. Everything that the optimizer keeps is copied: tensors of
    any dtype, numbers, None; tensors on the device of the parameter that they belong to. The ranks'
    parameters must be the same in number and order.

    Raises:
        ValueError: `root_rank` is no rank of the job.
        BytePSError: the job failed.
    """
    content = b""
    if ops.rank() == root_rank:
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        content = buffer.getvalue()
    received = _content_of(content, root_rank, f"{prefix}optimizer_state")
    if ops.rank() != root_rank:
        optimizer.load_state_dict(torch.load(io.BytesIO(received), weights_only=True))


_FIRST_WORDS = 512
"""Length of the first message, in words: three words, then the beginning of the content."""
_CHUNKS = (4 << 20, 64 << 10)
"""Lengths of the chunks in which the rest of the content is sent. The longer length is used as long
as the content fills it."""
_CHUNKS_IN_FLIGHT = 4


def _content_of(content: bytes, root_rank: int, name: str) -> bytes:
    """Return the root's content, which may have any length.

    The content is sent in chunks of two lengths, with one name for each length. A server keeps a
    declaration for every name, so names for each length of content would fill its memory.

    Raises:
        BytePSError: ranks give different roots.
    """
    _check_root(root_rank)
    first = torch.zeros(_FIRST_WORDS, dtype=torch.int64)
    first[:3] = torch.tensor([root_rank, root_rank**2, len(content)])
    beginning = first[3:].view(torch.uint8)
    _put(content[: len(beginning)], beginning)
    ops.push_pull_inplace(first, average=False, name=f"{name}/first")
    roots, squares, length = first[:3].tolist()
    if (roots, squares) != (root_rank * ops.size(), root_rank**2 * ops.size()):
        raise BytePSError(
            f"ranks give different root_rank to the broadcast of {name!r}, this rank {root_rank}: "
            "pass the same root_rank on all ranks"
        )
    received = torch.empty(length, dtype=torch.uint8)
    sent = min(length, len(beginning))
    received[:sent] = beginning[:sent]
    in_flight: deque[tuple[int, torch.Tensor, int]] = deque()
    while sent < length or in_flight:
        if sent < length and len(in_flight) < _CHUNKS_IN_FLIGHT:
            size = next((size for size in _CHUNKS if size <= length - sent), _CHUNKS[-1])
            chunk = torch.zeros(size, dtype=torch.uint8)
            _put(content[sent : sent + size], chunk)
            handle = ops.push_pull_async_inplace(chunk, average=False, name=f"{name}/{size}")
            in_flight.append((sent, chunk, handle))
            sent += size
            continue
        begin, chunk, handle = in_flight.popleft()
        ops.synchronize(handle)
        received[begin : begin + len(chunk)] = chunk[: length - begin]
    return received.numpy().tobytes()


def _put(content: bytes, values: torch.Tensor) -> None:
    """Copy the content to the beginning of `values`."""
    if content:
        values[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _check_root(root_rank: int) -> None:
    if not 0 <= root_rank < ops.size():
        raise ValueError(f"root_rank is {root_rank}, and there are {ops.size()} ranks")
