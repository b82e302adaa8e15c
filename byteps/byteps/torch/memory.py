"""Memory that gradients are sent from, made known so that RDMA registers it once.

A transport that registers memory with a device wants to do so once for a buffer that is sent every
step, and must not use that registration for whatever comes to lie at the same address later. Who
knows how long memory lives is torch: the registration lasts as long as the tensor's storage.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from byteps.torch import c_lib


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
    end = weakref.finalize(storage, _forget, address, number)
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


def _forget(address: int, number: int) -> None:
    c_lib.remove_memory(number)
    known = _known.get(address)
    if known is not None and known.number == number:
        del _known[address]
