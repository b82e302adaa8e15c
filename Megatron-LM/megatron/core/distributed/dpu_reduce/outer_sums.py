# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Megatron-FSDP with hybrid sharding: sums over the replicas of a model that is sharded.

Within a replica gradients are reduce-scattered, which stays with ``torch.distributed``. Then each
shard is all-reduced over the replicas, which are on different hosts where a replica fills its own.
That all-reduce goes through servers where these are faster.

Megatron-FSDP orders its work by streams and events, and the end of a push-pull is known to the host
alone. So the event that stands for a sum is one of ours: to wait for it is to wait for the sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import bytepslib, job

if TYPE_CHECKING:
    from byteps.torch.c10d.reductions import Reductions

    from ..distributed_data_parallel_config import DistributedDataParallelConfig

_Group = torch.distributed.ProcessGroup
_Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, and the sums that are to be copied into them."""

_known: weakref.WeakKeyDictionary[_Group, Reductions] = weakref.WeakKeyDictionary()


def forget() -> None:
    """Name the sums of each group anew."""
    for one in _known.values():
        one.close()
    _known.clear()


class OuterReduction:
    """The all-reduces of a bucket group over replicas."""

    def __init__(self, config: DistributedDataParallelConfig, group: _Group) -> None:
        """
        Args:
            config: of the model.
            group: of ranks that hold the same shard.
        """
        self._group = group
        self._reductions = None
        if getattr(config, "use_dpu_reduce", False):
            self._reductions = _reductions(config, group)
        self._works: list[Any] = []

    def all_reduce(self, tensor: torch.Tensor, op: torch.distributed.ReduceOp.RedOpType) -> None:
        """Start the sum or average of a tensor, in place.

        What a CUDA graph records stays with NCCL: a replay runs nothing on the host.

        Raises:
            byteps.torch.BytePSError: the job failed, or members disagree about the tensor.
        """
        work = None
        if self._reductions is not None:
            average = op == torch.distributed.ReduceOp.AVG
            work = self._reductions.begin(tensor, average=average)
        if work is None:
            torch.distributed.all_reduce(tensor, group=self._group, op=op)
        else:
            self._works.append(work)

    def end(self, copies: _Copies, stream: torch.cuda.Stream) -> Any:
        """All were started, on this stream.

        Returns:
            an event: once it was waited for, the sums are there, and copied.
        """
        if self._works:
            return _SumsEvent(self._works, copies, stream)
        _copy(copies)
        return stream.record_event()


class _SumsEvent:
    """Stands in for a CUDA event."""

    def __init__(self, works: Sequence[Any], copies: _Copies, stream: torch.cuda.Stream) -> None:
        self._works, self._copies, self._stream = list(works), list(copies), stream
        self._event: Any = None

    def wait(self) -> None:
        """Block until the sums are there; on a GPU, for the current stream's work from now on.

        Raises:
            byteps.torch.BytePSError: a sum failed; the text names the peer.
        """
        if self._event is None:
            with torch.cuda.stream(self._stream):
                for work in self._works:
                    work.wait()
                _copy(self._copies)
                self._event = self._stream.record_event()
            self._works, self._copies = [], []
        self._event.wait()


def _copy(copies: _Copies) -> None:
    for into, value in copies:
        into.copy_(value)


def _reductions(config: DistributedDataParallelConfig, group: _Group) -> Reductions:
    if group not in _known:
        _known[group] = bytepslib.reductions.Reductions(
            job.ranks_of(group),
            "megatron-fsdp",
            bytepslib.policy.Settings(
                backend=config.dpu_reduce_route or bytepslib.routes.AUTO,
                min_bytes=1,
                wire_dtype=config.dpu_reduce_wire_dtype or bytepslib.policy.SAME,
            ),
        )
    return _known[group]
