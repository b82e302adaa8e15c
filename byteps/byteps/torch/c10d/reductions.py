"""The all-reduces of one group of ranks through the servers."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from byteps.torch import c_lib, nodes, operations, session
from byteps.torch.c10d import joining, policy
from byteps.torch.c10d.streamed_work import StreamedWork
from byteps.torch.c10d.work import Line, ServerWork, Work
from byteps.torch.figures import setting
from byteps.torch.routes import COLLECTIVE, FLAT
from byteps.torch.tensors import flat_view, is_dense
from byteps.torch.wire import WireType

_logger = logging.getLogger(__name__)
_told_of_blocking: list[bool] = []

MOST_NAMES = 1024
"""Tensors of so many lengths, types and operations are known to the servers for each group: a
program that makes ever new lengths would fill their memory. Others stay with NCCL or gloo."""


class Reductions:
    """All-reduces of a group. Every member makes one, and starts the same ones in the same order.

    Names are of the group, the type, the length and the operation: several of one name may be in
    flight, and are told apart by their order.
    """

    def __init__(
        self, ranks: Sequence[int], kind: str, settings: policy.Settings | None = None
    ) -> None:
        """
        Args:
            ranks: global ranks of the group, in its order.
            kind: of these all-reduces, the same on all members. Those of two objects that live at
                the same time, of the same kind and ranks, are told apart by which was made first.
            settings: the same on all members. None: those of the variables BYTEPS_C10D_*.
        """
        self._ranks = tuple(ranks)
        self._settings = settings or policy.Settings.read()
        digest = hashlib.sha256(repr(self._ranks).encode()).hexdigest()[:12]
        self._key = _keys.take(f"{kind}/{digest}")
        self._session = 0
        self._routes: dict[torch.dtype, str] = {}
        self._sums: dict[tuple[torch.dtype, int, bool, torch.device], _Reduction] = {}
        self._line = Line()

    def close(self) -> None:
        """Nothing is started any more; another object may take the names."""
        _keys.give_back(self._key)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a sum or average of the tensor goes through the servers: a function of its type,
        length and layout, and of what was taken before, so that all members say the same."""
        if (
            tensor.dtype not in policy.SUMMED
            or tensor.nbytes < self._settings.min_bytes
            or len(self._ranks) == 1
            or tensor.layout != torch.strided
            or tensor.device.type not in ("cpu", "cuda")
            or not is_dense(tensor)
        ):
            return False
        if self._route(tensor.dtype) == COLLECTIVE:
            return False
        return len(self._sums) < MOST_NAMES or any(
            key[:2] == (tensor.dtype, tensor.numel()) for key in self._sums
        )

    def begin(self, tensor: torch.Tensor, *, average: bool, priority: int = 0) -> Work | None:
        """As `start`, of any tensor; None: it does not go through the servers.

        What a CUDA graph records does not: a replay runs nothing on the host.
        """
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        known = self._sums.get((tensor.dtype, tensor.numel(), average, tensor.device))
        if (
            known is None
            or tensor.layout is not torch.strided
            or not tensor.is_contiguous()
            or self._session != session.number()
            or not session.is_initialized()
        ):
            if not self.takes(tensor):
                return None
            return self.start(tensor, average=average, priority=priority)
        # What was asked before is not asked again: a call must cost little.
        is_flat = tensor.dim() == 1 and not tensor.requires_grad
        return known.start(tensor, tensor if is_flat else tensor.detach().view(-1), priority)

    def start(self, tensor: torch.Tensor, *, average: bool, priority: int = 0) -> Work:
        """Start an all-reduce in place of a tensor that `takes` takes.

        Args:
            tensor: dense, of any shape, on the CPU or a GPU.
            average: divide the sum by the number of ranks.
            priority: higher goes first.

        Raises:
            BytePSError: the job failed, or members disagree about the tensor.
        """
        flat = flat_view(tensor, "the tensor")
        key = tensor.dtype, tensor.numel(), average, tensor.device
        if key not in self._sums:
            self._sums[key] = self._prepare(flat, average)
        return self._sums[key].start(tensor, flat, priority)

    def _route(self, dtype: torch.dtype) -> str:
        job = joining.joined()
        if self._session != session.number():  # another job may have other servers
            self._session = session.number()
            self._routes.clear()
            self._sums.clear()
        if dtype not in self._routes:
            decision = policy.decide_for(job, self._ranks, dtype, self._settings)
            self._routes[dtype] = decision.route
        return self._routes[dtype]

    def _prepare(self, flat: torch.Tensor, average: bool) -> _Reduction:
        dtype, wire = flat.dtype, self._settings.wire_of(flat.dtype)
        operation = "average" if average else "sum"
        of_type = str(dtype).removeprefix("torch.")
        name = f"{self._key}/{of_type}/{flat.numel()}/{operation}"
        if self._route(dtype) == FLAT:
            return _Flat(name, self._ranks, average, wire)
        hosts = joining.joined().hosts
        layout = nodes.HostLayout.of(self._ranks, [str(hosts[rank]) for rank in self._ranks])
        node_sum = nodes.whole_sum(name, layout, flat, average=average, wire_dtype=wire)
        gatherer = None
        if flat.is_cuda:
            ranks = layout.on_host_of(dist.get_rank())
            gatherer = nodes.groups.get(ranks, flat.device, purpose="gather")
        return _NodeFirst(node_sum, self._line, gatherer)


class _Reduction:
    """How tensors of one length and type are reduced."""

    def start(self, tensor: torch.Tensor, flat: torch.Tensor, priority: int) -> Work:
        raise NotImplementedError


class _Flat(_Reduction):
    def __init__(self, name: str, ranks: tuple[int, ...], average: bool, wire: WireType) -> None:
        self._name = name
        self._ranks = ranks
        self._average = average
        self._wire = wire

    def start(self, tensor: torch.Tensor, flat: torch.Tensor, priority: int) -> Work:
        handle = operations.start(
            flat,
            flat,
            average=self._average,
            name=self._name,
            priority=priority,
            group=self._ranks,
            placement=None,
            wire_dtype=self._wire,
            checked=True,
            streamed=tensor.is_cuda,
        )
        if _are_streamed(tensor, [handle]):
            return StreamedWork([tensor], partial(operations.land, handle))
        return ServerWork([tensor], [handle], partial(operations.synchronize, handle))


class _NodeFirst(_Reduction):
    def __init__(
        self, node_sum: nodes.NodeSum, line: Line, gatherer: nodes.NodeGroup | None
    ) -> None:
        self._sum = node_sum
        self._line = line
        self._gatherer = gatherer

    def start(self, tensor: torch.Tensor, flat: torch.Tensor, priority: int) -> Work:
        node_sum = self._sum if priority == 0 else replace(self._sum, priority=priority)
        pending = node_sum.start(flat, streamed=self._gatherer is not None)
        if self._gatherer is not None and _are_streamed(tensor, pending.handles):
            parts = [part for _, part, _ in pending.pending]
            receive = partial(pending.receive, self._gatherer)
            return StreamedWork([tensor], partial(operations.land_by, receive), parts)
        work = ServerWork([tensor], pending.handles, pending.wait, self._line)
        work.complete_by_itself()  # ranks of this host may need its part
        return work


def _are_streamed(tensor: torch.Tensor, handles: Sequence[int]) -> bool:
    """Whether streams wait for these sums. If they could, and do not, say why, once."""
    if not tensor.is_cuda:
        return False
    if all(map(c_lib.is_streamed, handles)):
        return True
    if not _told_of_blocking:
        _told_of_blocking.append(True)
        _logger.warning(
            "an all-reduce of %d bytes finds no room in pinned memory, and blocks the host when it "
            "is awaited: give this worker more than BYTEPS_STREAMED_BYTES=%s",
            *(tensor.nbytes, setting("BYTEPS_STREAMED_BYTES")),
        )
    return False


class _Keys:
    """Tells objects of one kind and group apart, by small numbers that are used again."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, kind: str) -> str:
        number = 0
        while (key := f"{kind}/{number}") in self._taken:
            number += 1
        self._taken.add(key)
        return key

    def give_back(self, key: str) -> None:
        self._taken.discard(key)


_keys = _Keys()


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Global ranks of a group, in its order; None: of the default group."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)
