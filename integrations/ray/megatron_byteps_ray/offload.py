"""Moves a rank's parameters, gradients and optimizer state off its device between steps, and back.

    class Trainer(Offloads):
        def __init__(self):
            ...
            self.device_state = DeviceState([model], optimizer)

    group = Group.start(Trainer, Mesh(data=4), gpus=1)
    group.call("offload", by="all")       # the devices are free for something else
    group.call("reload", by="all")        # before the next step

Tensors and their views stay the same objects: only their storages are freed and come back, possibly
at other addresses. Nothing may read them while they are away.

Megatron's own functions are not sufficient. Those of a gradient buffer move parameters only with
the distributed optimizer, and lose them on a CPU, where the copy is the freed tensor itself. Those
of the optimizer give fp32 parameters separate storages, so that the model misses their updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch


class DeviceState:
    """State that a rank keeps on its device between steps. Not thread-safe."""

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: Any = None) -> None:
        """Manage the state of these model chunks, wrapped for data parallelism or not.

        Args:
            optimizer: Megatron's, or an optimizer of torch.optim; None without training.
        """
        self._chunks = list(chunks)
        self._optimizer = optimizer
        self._away: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        """Offloaded storages: a tensor in the storage, its bytes, and their copy on the host."""

    def offload(
        self, *, parameters: bool = True, gradients: bool = True, optimizer: bool = True
    ) -> int:
        """Copy the selected state to the host, and free it on the device; return the freed bytes.

        Gradients are not copied: their buffers come back as zeros, as before each step. State that
        is already offloaded stays so.

        Raises:
            RuntimeError: a storage cannot be freed, because NumPy or a file shares it.
        """
        _synchronize()
        own = list(self._parameters())
        kept = set() if parameters else {_address(tensor) for tensor in own}
        before = len(self._away)
        if parameters:
            self._leave(own, kept, copied=True)
        if gradients:
            self._leave(self._gradients(), kept, copied=False)
        if optimizer:
            # In fp32 the optimizer's parameters are the model's own, or views of them.
            self._leave(self._states(), kept, copied=True)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return sum(size for _, size, _ in self._away[before:])

    def reload(self) -> int:
        """Bring back everything that is offloaded; return its bytes."""
        count = 0
        while self._away:
            tensor, size, copy = self._away[-1]
            storage = tensor.untyped_storage()
            storage.resize_(size)
            whole = _bytes_of(tensor)
            if copy is None:
                whole.zero_()
            else:
                whole.copy_(copy, non_blocking=True)
            count += size
            # Removed only now: if memory is insufficient, the copy still exists.
            self._away.pop()
        _synchronize()
        return count

    def held_bytes(self) -> int:
        """Return the bytes of parameters, gradients and optimizer state on the device now."""
        tensors = [*self._parameters(), *self._gradients(), *self._states()]
        sizes = {_address(t): t.untyped_storage().nbytes() for t in tensors if _address(t)}
        return sum(sizes.values())

    def _leave(self, tensors: Iterable[torch.Tensor], kept: set[int], *, copied: bool) -> None:
        for tensor in tensors:
            storage, address = tensor.untyped_storage(), _address(tensor)
            if address == 0 or address in kept:
                continue
            copy = None
            if copied:
                whole = _bytes_of(tensor)
                copy = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=tensor.is_cuda)
                copy.copy_(whole)
            size = storage.nbytes()
            storage.resize_(0)
            self._away.append((tensor, size, copy))

    def _parameters(self) -> Iterator[torch.Tensor]:
        for chunk in self._chunks:
            for parameter in chunk.parameters():
                yield parameter.data

    def _gradients(self) -> Iterator[torch.Tensor]:
        for chunk in self._chunks:
            for name in ("buffers", "expert_parallel_buffers"):
                buffers = getattr(chunk, name, ())
                # In a module that is not wrapped, ``buffers`` is a method.
                for buffer in () if callable(buffers) else buffers:
                    yield buffer.grad_data
            for parameter in chunk.parameters():
                if parameter.grad is not None:
                    yield parameter.grad

    def _states(self) -> Iterator[torch.Tensor]:
        for one in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            inner = getattr(one, "optimizer", one)
            for group in getattr(inner, "param_groups", ()):
                for parameter in group["params"]:
                    yield parameter.data
            for state in getattr(inner, "state", {}).values():
                # Step counts are single values, and may be on the host.
                yield from (v for v in state.values() if torch.is_tensor(v) and v.numel() > 1)


class Offloads:
    """Mixin for classes whose group of ranks offloads: set ``device_state``."""

    device_state: DeviceState

    def offload(self, **which: bool) -> int:
        """See ``DeviceState.offload``."""
        return self.device_state.offload(**which)

    def reload(self) -> int:
        """See ``DeviceState.reload``."""
        return self.device_state.reload()


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it is empty."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else 0


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
