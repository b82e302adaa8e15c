"""Operations in flight: keeps their tensors alive, tracks registered memory, calls completions.

RDMA should register a buffer only once, even if it is sent every step. But it must not use that
registration for other memory that later gets the same address. So a registration lasts exactly as
long as the tensor's storage.
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
from byteps.torch.spans import leave_out_this_thread
from byteps.torch.wire import WireType, decode, encode

_logger = logging.getLogger(__name__)


class Completions:
    """Calls a function at the end of each operation that it watches.

    The engine queues handles of ended operations, and one thread takes them from the queue. So no
    thread waits for a single operation, and the engine's threads never wait for Python.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._then: dict[int, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None

    def call_at_end(self, handle: int, then: Callable[[], None]) -> bool:
        """Call `then` on the thread of completions once `synchronize(handle)` would not block.

        Args:
            handle: handle of an operation.
            then: function that must not block for long, because later calls wait behind it.

        Returns:
            whether `then` will be called. False: the operation was synchronized already.
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
        """Stop the thread after it has handled the operations that have ended by now."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        c_lib.wake()
        if thread is not threading.current_thread():
            # The thread was told to stop, so this wait is ended by its return; deadline: none.
            thread.join()

    def forget(self) -> None:
        """Reset in a forked process, which has neither the thread nor operations."""
        self.__init__()  # type: ignore[misc]

    def _run(self) -> None:
        leave_out_this_thread()
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
"""Completions of this process."""


def has_ended(handle: int) -> bool:
    """Return whether `synchronize(handle)` would not block. True if the handle was synchronized
    already."""
    try:
        return c_lib.poll(handle)
    except ValueError:
        return True


def await_end(handle: int, limit_s: float) -> bool:
    """Wait at most `limit_s` seconds; return whether `synchronize(handle)` would not block.

    Returns true if the handle was synchronized already. Raises exceptions of signal handlers.
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
    """Number that the engine has given this memory."""
    end: weakref.finalize
    """Finalizer that unregisters the memory when its storage is freed."""


_known: dict[int, _Known] = {}
"""Registered storages, by address."""


def will_be_sent(tensor: torch.Tensor) -> None:
    """Tell the engine about the storage of a CPU tensor, before values are sent from it.

    The caller does so for every tensor, so that the engine forgets stale memory at the same
    address. The engine also forgets a storage at once when it is freed or resized. (Trainers that
    release memory between steps resize storages. The same address may then have other pages.)
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
    """Make `UntypedStorage.resize_` forget the storage first, because torch has no hook for
    this."""
    if torch.UntypedStorage.resize_ is _resize:
        # torch declares the method in a base class, for all kinds of storage.
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


# This class is not frozen, because construction would then take 3 us longer.
@dataclass(slots=True, kw_only=True)
class Sum:
    """Tensors of a push_pull."""

    sent: torch.Tensor
    """Tensor that the engine reads: the caller's, or a copy in the wire dtype."""
    received: torch.Tensor
    """Tensor that the engine writes: the caller's output, or the copy in the wire dtype."""
    output: torch.Tensor
    """The caller's output."""
    elements: tuple[int, int]
    """Range of elements to receive, in the flattened tensor: the first, and the last plus one."""
    name: str
    stream: int
    """Stream in which the operation was started, as `wire.current_stream` returns it."""
    wire: WireType
    values: torch.Tensor
    """The caller's values. The engine reads them if it encodes them itself."""
    lost: torch.Tensor | None = None
    """Memory of the rounding losses, if they are kept. The engine reads and updates it when it
    encodes the values itself."""

    def finish(self) -> torch.Tensor:
        """Return the caller's output with the sums in its own type; on a GPU, in the current
        stream."""
        if self.received is not self.output:
            self._convert()
            self._give_back()
        return self.output

    def _convert(self) -> None:
        if not self.wire.is_block:
            part = slice(*self.elements)
            self.output.view(-1)[part].copy_(self.received.view(-1)[part])
        elif self.received.is_cuda:  # On the CPU the engine has already decoded the values.
            begin, end = self.elements
            first, skip = divmod(begin, self.wire.values)
            received = self.received[first * self.wire.element_bytes :]
            decode(received, self.wire, self.output.view(-1)[begin:end], skip=skip)

    def _give_back(self) -> None:
        """Keep the copy in the wire dtype for its next use."""
        if self.received.is_cuda:
            now = torch.cuda.current_stream(self.received.device)
            # Without this call, torch would give the memory to other work of the stream that
            # allocated it.
            if now.cuda_stream != self.stream:
                self.received.record_stream(now)
        elif registers_memory:
            _wire_copies[self.name] = self.received


registers_memory = False
"""Whether the transport registers memory that it sends; set when this process joins a job."""
rank = -1
"""This worker's rank; set when this process joins a job."""
sums: dict[int, Sum] = {}
"""Sums in flight, by handle."""
updates: dict[int, tuple[torch.Tensor, ...]] = {}
"""Tensors that the engine reads and writes for parameters that servers update, by handle."""
failed: list[Sum | tuple[torch.Tensor, ...]] = []
"""Tensors of failed operations: the transport may read their memory until it is shut down."""
_wire_copies: dict[str, torch.Tensor] = {}
"""Unused copies in the wire dtype, by name. They are kept only if the transport registers memory,
so that it registers each copy once."""
_rounds: dict[str, int] = {}
"""Number of sums per name that this process has rounded stochastically in this job."""


class Holder(Protocol):
    """Keeps handles of operations between calls."""

    def forget(self) -> None:
        """Drop all handles: the job has ended."""


holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def held() -> list[Sum | tuple[torch.Tensor, ...]]:
    """Return all tensors whose memory the engine may still use."""
    return [*sums.values(), *updates.values(), *failed]


def keep_failed(handle: int) -> None:
    """Keep the tensors of a failed sum."""
    operation = sums.pop(handle, None)
    if operation is not None:
        failed.append(operation)


def forget() -> None:
    """Release all tensors: the job has ended, and nothing reads or writes their memory any more."""
    for tensors in (sums, updates, failed, _wire_copies, _rounds):
        tensors.clear()
    for holder in list(holders):
        holder.forget()


def forget_name(name: str) -> None:
    """Release the state kept for the next sum of a name, because the name now stands for another
    tensor."""
    _wire_copies.pop(name, None)
    _rounds.pop(name, None)


def wire_copy(
    tensor: torch.Tensor, wire: WireType, name: str, lost: torch.Tensor | None
) -> torch.Tensor:
    """Return a copy of the tensor in the type in which it travels; on a GPU, in the current stream.

    For blocks on the CPU the copy is only memory. The engine fills it while it sends.

    Args:
        tensor: contiguous.
        wire: a type other than the tensor's.
        name: name of the sum.
        lost: losses of earlier roundings of this tensor, if they are kept.
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
    """Return memory for a copy in the wire dtype: the copy kept for this name, or new memory."""
    memory = _wire_copies.pop(name, None)
    if memory is None or memory.numel() != numel or memory.dtype != dtype:
        return torch.empty(numel, dtype=dtype, device=device)
    return memory.view(-1)


def next_seed(name: str) -> int | None:
    """Return the seed for the next values that this process rounds under a name. The engine would
    use the same (BYTEPS_STOCHASTIC_ROUNDING). None: round to nearest."""
    if not setting("BYTEPS_STOCHASTIC_ROUNDING", bool):
        return None
    number = _rounds.get(name, 0)
    _rounds[name] = number + 1
    return c_lib.chance_seed(name, number, rank)
