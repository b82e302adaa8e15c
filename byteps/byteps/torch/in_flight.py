"""Operations in flight: what keeps their tensors and registered memory, and what their end calls.

A transport that registers memory with a device wants to do so once for a buffer that is sent every
step, and must not use that registration for whatever comes to lie at the same address later. Who
knows how long memory lives is torch: the registration lasts as long as the tensor's storage.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from byteps.torch import c_lib
from byteps.torch.figures import setting
from byteps.torch.wire import WireType, decode, encode

_logger = logging.getLogger(__name__)


class Completions:
    """Calls a function for each operation that it watches, once that has ended.

    The engine queues the handles of ended operations; one thread takes them from there. So no
    thread waits for any one operation, and the engine's threads never wait for Python.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._then: dict[int, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None

    def call_at_end(self, handle: int, then: Callable[[], None]) -> bool:
        """Call `then` on the thread of completions once `synchronize(handle)` would not block.

        Args:
            handle: of an operation.
            then: must not block for long, since others wait behind it.

        Returns:
            Whether it will be called. False: the operation was synchronised already.
        """
        with self._lock:
            self._then[handle] = then
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="byteps-completions", daemon=True
                )
                self._thread.start()
        try:
            c_lib.watch(handle)
        except ValueError:
            with self._lock:
                del self._then[handle]
            return False
        return True

    def stop(self) -> None:
        """End the thread, once it has called for all operations that have ended by now."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        c_lib.wake()
        if thread is not threading.current_thread():
            # Ended by the end of its thread, which was told; deadline: none.
            thread.join()

    def forget(self) -> None:
        """In a forked process: there is no thread, and no operation is this process's."""
        self.__init__()  # type: ignore[misc]

    def _run(self) -> None:
        while handles := c_lib.await_ended():
            for handle in handles:
                with self._lock:
                    then = self._then.pop(handle, None)
                if then is None:
                    continue
                try:
                    then()
                except Exception:
                    _logger.exception("what follows a reduction failed")


completions = Completions()
"""Of this process."""


def has_ended(handle: int) -> bool:
    """Whether `synchronize(handle)` would not block; true where the handle was synchronised."""
    try:
        return c_lib.poll(handle)
    except ValueError:
        return True


def await_end(handle: int, limit_s: float) -> bool:
    """Whether `synchronize(handle)` would not block after at most so many seconds.

    True where the handle was synchronised already. An exception of a signal handler is raised.
    """
    try:
        return c_lib.await_end(handle, limit_s)
    except ValueError:
        return True


@dataclass(frozen=True, kw_only=True)
class _Known:
    storage: weakref.ref[torch.UntypedStorage]
    bytes: int
    number: int
    """Of the engine's."""
    end: weakref.finalize
    """Forgets it with the storage."""


_known: dict[int, _Known] = {}
"""By address."""


def will_be_sent(tensor: torch.Tensor) -> None:
    """Make the storage of a CPU tensor known, before values are sent from it.

    To be called for every tensor: what was at the same place before is forgotten then. A storage
    that is freed is forgotten at once, and so is one that is resized, as trainers do that give
    memory away between steps: it may come back at the same address, in other pages.
    """
    _watch_resizes()
    storage = tensor.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    before = _known.get(address)
    if before is not None and before.bytes == size and before.storage() is storage:
        return
    number = c_lib.add_memory(address, size)
    # torch keeps the Python object of a storage for as long as the storage lives.
    end = weakref.finalize(storage, _forget_memory, address, number)
    end.atexit = False
    _known[address] = _Known(storage=weakref.ref(storage), bytes=size, number=number, end=end)


_resize = torch.UntypedStorage.resize_


def _watch_resizes() -> None:
    """Have `UntypedStorage.resize_` forget the storage first: torch tells nobody of it."""
    if torch.UntypedStorage.resize_ is _resize:
        # torch declares the method of a base class, for all kinds of storages.
        torch.UntypedStorage.resize_ = _forget_and_resize  # type: ignore[assignment]


def _forget_and_resize(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    known = _known.get(self.data_ptr())
    if known is not None and known.storage() is self:
        known.end()
    return _resize(self, size)


def _forget_memory(address: int, number: int) -> None:
    c_lib.remove_memory(number)
    known = _known.get(address)
    if known is not None and known.number == number:
        del _known[address]


@dataclass(slots=True, kw_only=True)  # a frozen one takes 3 us longer to make
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
    """As `wire.current_stream` gives it, when the operation was started."""
    wire: WireType
    values: torch.Tensor
    """The caller's values, which the engine reads where it encodes them itself."""
    lost: torch.Tensor | None = None
    """The memory that it reads and writes then, where losses are kept."""

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
            decode(received, self.wire, self.output.view(-1)[begin:end], skip=skip)

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
rank = -1
"""This worker's; likewise."""
sums: dict[int, Sum] = {}
"""By handle."""
updates: dict[int, tuple[torch.Tensor, ...]] = {}
"""What the engine reads and writes for tensors that servers update, by handle."""
failed: list[Sum | tuple[torch.Tensor, ...]] = []
"""Of operations that failed: the transport may read their memory until it is shut down."""
_wire_copies: dict[str, torch.Tensor] = {}
"""Copies in the wire dtype that nobody uses, by name: kept where the transport registers what it
sends, so that it does so once."""
_rounds: dict[str, int] = {}
"""How many values of each name this job has begun to round by chance."""


class Holder(Protocol):
    """Keeps handles of operations between calls of its user."""

    def forget(self) -> None:
        """The job was left: these handles are of no use any more."""


holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def held() -> list[Sum | tuple[torch.Tensor, ...]]:
    """All tensors whose memory the engine may still use."""
    return [*sums.values(), *updates.values(), *failed]


def keep_failed(handle: int) -> None:
    """Keep the tensors of a sum that failed."""
    operation = sums.pop(handle, None)
    if operation is not None:
        failed.append(operation)


def forget() -> None:
    """The job is left: let go of all tensors, whose memory nothing reads or writes any more."""
    for kept in (sums, updates, failed, _wire_copies, _rounds):
        kept.clear()
    for holder in list(holders):
        holder.forget()


def forget_name(name: str) -> None:
    """Another tensor comes under this name: let go of what is kept for its next sum."""
    _wire_copies.pop(name, None)
    _rounds.pop(name, None)


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
            encode(tensor.view(-1), wire, copy, lost, next_seed(name))
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


def next_seed(name: str) -> int | None:
    """For what this process rounds next under a name, as the engine has it for what it rounds
    itself (BYTEPS_STOCHASTIC_ROUNDING); None: to the nearest."""
    if not setting("BYTEPS_STOCHASTIC_ROUNDING", bool):
        return None
    number = _rounds.get(name, 0)
    _rounds[name] = number + 1
    return c_lib.chance_seed(name, number, rank)
