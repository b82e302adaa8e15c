"""Takes a rank's parameters, gradients and optimizer state off its device between steps, and back.

    class Trainer(Offloads):
        def __init__(self):
            ...
            self.device_state = DeviceState([model], optimizer)

    group = Group.start(Trainer, Mesh(data=4), gpus=1)
    group.call("offload", by="all")       # the devices are free for something else
    group.call("reload", by="all")        # before the next step

Tensors stay the objects that they are, and so do all views of them: only their storages are freed,
and come back, maybe at other addresses. While they are away nothing may read them.

Megatron's own calls do less. Those of a gradient buffer move parameters with the distributed
optimizer alone, and lose them on a CPU, where their copy is the tensor that they free. The
optimizer's give fp32 parameters storages of their own, so that the model sees no update of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch


class DeviceState:
    """What a rank holds on its device from step to step. Not for several threads."""

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: Any = None) -> None:
        """Of these model chunks, wrapped for data parallelism or not.

        Args:
            optimizer: Megatron's, or one of torch.optim; None where nothing is trained.
        """
        self._chunks = list(chunks)
        self._optimizer = optimizer
        self._away: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        """Each storage, by a tensor that lies in it: its bytes, and their copy on the host."""

    def offload(
        self, *, parameters: bool = True, gradients: bool = True, optimizer: bool = True
    ) -> int:
        """Copy to the host what is asked for, and free it on the device; the bytes that were freed.

        Gradients are not copied: their buffers come back as zeros, as before each step. What is
        away already stays there.

        Raises:
            RuntimeError: a storage cannot be freed, since NumPy or a file shares it.
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
            # In fp32 its parameters are the model's own, or views of them.
            self._leave(self._states(), kept, copied=True)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return sum(size for _, size, _ in self._away[before:])

    def reload(self) -> int:
        """Bring back all that is away; its bytes."""
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
            # Only now: where there is no room for it, its copy is still there.
            self._away.pop()
        _synchronize()
        return count

    def held_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state that are on the device now."""
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
                # Of a module that is not wrapped, ``buffers`` is a method.
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
                # Counts of steps are single values, and may be on the host.
                yield from (v for v in state.values() if torch.is_tensor(v) and v.numel() > 1)


class Offloads:
    """What a class needs whose group of ranks is asked to offload: set ``device_state``."""

    device_state: DeviceState

    def offload(self, **which: bool) -> int:
        """See ``DeviceState.offload``."""
        return self.device_state.offload(**which)

    def reload(self) -> int:
        """See ``DeviceState.reload``."""
        return self.device_state.reload()


def _address(tensor: torch.Tensor) -> int:
    """Of its storage; 0 where that is empty."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else 0


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of its storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
