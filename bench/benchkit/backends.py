"""The ways to sum a tensor over all workers that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchkit.sockets import Sockets


class Backend(Protocol):
    """Sums tensors over all ranks, in place."""

    sums: bool
    """False where bytes are only moved: there are no results to verify."""

    def reduce(self, tensors: Sequence[torch.Tensor], label: str) -> None:
        """Start all sums, then wait until every one is done.

        Args:
            tensors: contiguous, the same shapes on all ranks.
            label: identifies the tensors: the same on all ranks and in all rounds, another one for
                others.
        """

    def close(self) -> None:
        """Leave the job; all ranks call it."""


class AllReduce:
    """torch.distributed's all_reduce, by gloo or NCCL."""

    sums = True

    def __init__(self, name: str) -> None:
        self._group = dist.new_group(backend=name)

    def reduce(self, tensors: Sequence[torch.Tensor], label: str) -> None:
        works = [dist.all_reduce(t, group=self._group, async_op=True) for t in tensors]
        for work in works:
            work.wait()

    def close(self) -> None:
        dist.destroy_process_group(self._group)


class PushPull:
    """BytePS; tensors are dealt to the servers as Megatron's buckets are, one after the other."""

    sums = True

    def __init__(self) -> None:
        import byteps.torch as bps

        self._bps = bps
        bps.init()

    def reduce(self, tensors: Sequence[torch.Tensor], label: str) -> None:
        handles, partitions = [], 0
        for index, tensor in enumerate(tensors):
            handle = self._bps.push_pull_async_inplace(
                tensor,
                average=False,
                name=f"{label}.{index}",
                priority=-index,
                placement=partitions,
            )
            handles.append(handle)
            partitions += -(-tensor.nbytes // self._bps.partition_bytes(tensor.nbytes))
        for handle in handles:
            self._bps.synchronize(handle)

    def close(self) -> None:
        self._bps.shutdown()


def make(name: str, sockets: Mapping[str, Any] | None = None) -> Backend:
    """The backend of that name, connected to the other ranks.

    ``sockets`` says to what the backend ``sockets`` connects: the arguments of its class.
    """
    if name == "sockets":
        return Sockets(**(sockets or {}))
    return PushPull() if name == "byteps" else AllReduce(name)
