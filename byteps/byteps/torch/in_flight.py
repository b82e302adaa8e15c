"""The tensors of operations in flight, kept alive until the engine is done with their memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from byteps.torch import blocks
from byteps.torch.chance import next_seed
from byteps.torch.wire import WireType


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
    wire: WireType
    values: torch.Tensor
    """The caller's values, which the engine reads where it encodes them itself."""

    def finish(self) -> torch.Tensor:
        """The caller's output, with the sums in its own type: on a GPU, for the current stream."""
        if self.received is not self.output:
            self._convert()
            self._give_back()
        return self.output

    def _convert(self) -> None:
        if not self.wire.is_block:
            part = slice(*self.elements)
            self.output.view(-1)[part].copy_(self.received.view(-1)[part])
        elif self.received.is_cuda:  # on the CPU the engine has done it
            begin, end = self.elements
            first, skip = divmod(begin, self.wire.values)
            received = self.received[first * self.wire.element_bytes :]
            blocks.decode(received, self.wire, self.output.view(-1)[begin:end], skip=skip)

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


def keep_failed(handle: int) -> None:
    """Keep the tensors of a sum that failed."""
    operation = sums.pop(handle, None)
    if operation is not None:
        failed.append(operation)


def forget() -> None:
    """Let go of all tensors, once nothing reads or writes their memory any more."""
    for kept in (sums, updates, failed, _wire_copies):
        kept.clear()


def wire_copy(
    tensor: torch.Tensor, wire: WireType, name: str, lost: torch.Tensor | None
) -> torch.Tensor:
    """A copy of the tensor as it travels; on a GPU it is made in the current stream.

    Of blocks on the CPU it is memory alone, which the engine fills as it sends.

    Args:
        tensor: contiguous.
        wire: another type than the tensor's own.
        name: of the sum.
        lost: what rounding lost of the tensor before, where it is kept.
    """
    if wire.is_block:
        copy = _memory(wire.nbytes(tensor.numel()), wire.memory, name, tensor.device)
        if tensor.is_cuda:
            blocks.encode(tensor.view(-1), wire, copy, lost, next_seed(name))
        return copy
    if tensor.is_cuda or not registers_memory:
        return tensor.to(wire.memory)
    return _memory(tensor.numel(), wire.memory, name, tensor.device).view_as(tensor).copy_(tensor)


def _memory(numel: int, dtype: torch.dtype, name: str, device: torch.device) -> torch.Tensor:
    """That of the last sum of this name, where it was kept."""
    kept = _wire_copies.pop(name, None)
    if kept is None or kept.numel() != numel or kept.dtype != dtype:
        return torch.empty(numel, dtype=dtype, device=device)
    return kept.view(-1)
