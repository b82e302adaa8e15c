"""The tensors of operations in flight, kept alive until the engine is done with their memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from byteps.torch import tensors


@dataclass(frozen=True, kw_only=True)
class Sum:
    """The tensors of a push_pull."""

    sent: torch.Tensor
    """What the engine reads: the caller's tensor, or a copy in the wire dtype."""
    received: torch.Tensor
    """What the engine writes: the caller's output, or that copy."""
    output: torch.Tensor
    """The caller's."""
    elements: tuple[int, int]
    """First and last plus one of the flattened elements that are wanted."""
    name: str
    stream: int
    """As `tensors.current_stream` gives it, when the operation was started."""

    def finish(self) -> torch.Tensor:
        """The caller's output, with the sums in its own type: on a GPU, for the current stream."""
        if self.received is not self.output:
            part = slice(*self.elements)
            self.output.view(-1)[part].copy_(self.received.view(-1)[part])
            self._give_back()
        return self.output

    def _give_back(self) -> None:
        """The copy in the wire dtype is free for its next use."""
        if self.received.is_cuda:
            now = torch.cuda.current_stream(self.received.device)
            # Or else torch would hand the memory out again to the other stream.
            if now.cuda_stream != self.stream:
                self.received.record_stream(now)
        elif registers_memory:
            _wire_copies[self.name] = self.received


registers_memory = False
"""Whether the transport registers what it sends; set when this process joins a job."""
sums: dict[int, Sum] = {}
"""By handle."""
updates: dict[int, tuple[torch.Tensor, ...]] = {}
"""What the engine reads and writes for tensors that servers update, by handle."""
failed: list[Sum | tuple[torch.Tensor, ...]] = []
"""Of operations that failed: the transport may read their memory until it is shut down."""
_wire_copies: dict[str, torch.Tensor] = {}
"""Copies in the wire dtype that nobody uses, by name: kept where the transport registers what it
sends, so that it does so once."""


def held() -> list[Sum | tuple[torch.Tensor, ...]]:
    """All tensors whose memory the engine may still use."""
    return [*sums.values(), *updates.values(), *failed]


def forget() -> None:
    """Let go of all tensors, once nothing reads or writes their memory any more."""
    for kept in (sums, updates, failed, _wire_copies):
        kept.clear()


def wire_copy(tensor: torch.Tensor, wire_dtype: torch.dtype, name: str) -> torch.Tensor:
    """A copy of the tensor in the wire dtype; on a GPU it is made in the current stream.

    Raises:
        ValueError: a tensor of this type cannot be sent so.
    """
    tensors.check_wire_dtype(tensor.dtype, wire_dtype)
    if tensor.is_cuda or not registers_memory:
        return tensor.to(wire_dtype)
    buffer = _wire_copies.pop(name, None)
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != wire_dtype:
        buffer = torch.empty_like(tensor, dtype=wire_dtype)
    return buffer.copy_(tensor)
