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


_known: dict[int, _Known] = {}
"""By address."""


def will_be_sent(tensor: torch.Tensor) -> None:
    """Make the storage of a CPU tensor known, before values are sent from it.

    To be called for every tensor: what was at the same place before is forgotten then. A storage
    that is freed is forgotten at once. (One that is resized to nothing and back, by
    `UntypedStorage.resize_`, and lands at the same address with the same size, looks as if it had
    never been away: over RDMA, do not.)
    """
    storage = tensor.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    before = _known.get(address)
    if before is not None and before.bytes == size and before.storage() is storage:
        return
    number = c_lib.add_memory(address, size)
    _known[address] = _Known(storage=weakref.ref(storage), bytes=size, number=number)
    # torch keeps the Python object of a storage for as long as the storage lives.
    weakref.finalize(storage, _forget, address, number).atexit = False


def _forget(address: int, number: int) -> None:
    c_lib.remove_memory(number)
    known = _known.get(address)
    if known is not None and known.number == number:
        del _known[address]
