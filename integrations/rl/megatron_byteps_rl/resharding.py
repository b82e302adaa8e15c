"""Weights from one parallel layout of a Megatron model to another, in memory.

``megatron.core.resharding`` plans who sends which slice to whom; what is here carries the slices
over a process group and counts them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.resharding import reshard_model_weights
from megatron.core.resharding.copy_services.base import (
    CopyService,
    RecvOp,
    SendOp,
    match_local_ops_by_task_id,
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one reshard took on this rank."""

    seconds: float
    sent_bytes: int
    """To other ranks."""
    kept_bytes: int
    """Copied within this rank, which had them already."""


class PeerCopies(CopyService):
    """Slices go from rank to rank by the group's own sends and receives: gloo's or NCCL's.

    Megatron's service for gloo copies through pinned memory, which a machine without a GPU has not.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._sends: list[SendOp] = []
        self._receives: list[RecvOp] = []
        self.sent_bytes = 0
        self.kept_bytes = 0

    def submit_send(
        self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None
    ) -> None:
        # Detached: sends and copies are no part of a backward pass.
        self._sends.append(SendOp(task_id, src_tensor.detach(), dest_rank))

    def submit_recv(
        self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None
    ) -> None:
        self._receives.append(RecvOp(task_id, dest_tensor, src_rank))

    def run(self) -> None:
        """Do all that was submitted; blocks until this rank has everything."""
        sends = [op for op in self._sends if op.dest_rank != self.rank]
        receives = [op for op in self._receives if op.src_rank != self.rank]
        kept = match_local_ops_by_task_id(
            [op for op in self._sends if op.dest_rank == self.rank],
            [op for op in self._receives if op.src_rank == self.rank],
            type(self).__name__,
            self.rank,
        )
        with torch.no_grad():
            for source, target in kept:
                target.tensor.copy_(source.tensor)
                self.kept_bytes += source.tensor.nbytes
        # The plan is one sequence on all ranks: messages of a pair of ranks meet in order.
        work = [
            dist.P2POp(dist.isend, op.tensor, group=self.group, group_peer=op.dest_rank)
            for op in sends
        ] + [
            dist.P2POp(dist.irecv, op.tensor, group=self.group, group_peer=op.src_rank)
            for op in receives
        ]
        for request in dist.batch_isend_irecv(work) if work else []:
            request.wait()
        self.sent_bytes += sum(op.tensor.nbytes for op in sends)
        self._sends.clear()
        self._receives.clear()


def _meet(device: torch.device, group: dist.ProcessGroup) -> None:
    """NCCL makes a group's communicator at its first operation, and all ranks have to be there: in
    a reshard a rank may have nothing to send or receive."""
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize(device)


def reshard(source: Sequence[Any], target: Any, group: dist.ProcessGroup) -> Cost:
    """Give ``target`` the weights of ``source``; all ranks of ``group`` call it together.

    Args:
        source: this rank's part of the model that trains, in chunks as Megatron keeps it.
        target: this rank's part of the same model in another layout, of the same type.
        group: every rank that has a part of either.

    Raises:
        ValueError: the source has several chunks a rank, or the types differ.
        RuntimeError: the models have not the same weights.
    """
    if len(source) != 1:
        raise ValueError(
            f"resharding takes one chunk of the model a rank, not {len(source)}: leave out "
            "virtual_pipeline_model_parallel_size"
        )
    types = [{parameter.dtype for parameter in m.parameters()} for m in (source[0], target)]
    if types[0] != types[1]:
        names = [", ".join(sorted(map(str, some))) for some in types]
        raise ValueError(f"resharding: weights of type {names[0]} cannot become {names[1]}")
    service = PeerCopies(group)
    _meet(next(target.parameters()).device, group)
    begin = time.monotonic()
    with torch.profiler.record_function("reshard"):
        reshard_model_weights(source[0], target, service, group=group)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return Cost(
        seconds=time.monotonic() - begin,
        sent_bytes=service.sent_bytes,
        kept_bytes=service.kept_bytes,
    )
