"""The ways to sum a tensor over all workers that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bench.kit.plan import SAME
from bench.pushpull.sockets import Sockets

_NODES, _FP8 = "-nodes", "-fp8"


class Backend(Protocol):
    """Sums tensors over all ranks, in place."""

    sums: bool
    """False where bytes are only moved: there are no results to verify."""

    def reduce(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        """Start all sums, then wait until every one is done.

        Args:
            tensors: contiguous, the same shapes on all ranks.
            label: identifies the tensors: the same on all ranks and in all rounds, another one for
                others.
            wire: in which BytePS sends them.
        """

    def form(self, wire: str) -> str:
        """The form to which values are rounded on their way, as `Pattern` has it."""

    def close(self) -> None:
        """Leave the job; all ranks call it."""


class AllReduce:
    """torch.distributed's all_reduce, by gloo or NCCL."""

    sums = True

    def __init__(self, name: str) -> None:
        self._group = dist.new_group(backend=name)

    def reduce(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        works = [dist.all_reduce(t, group=self._group, async_op=True) for t in tensors]
        for work in works:
            work.wait()

    def form(self, wire: str) -> str:
        return SAME

    def close(self) -> None:
        dist.destroy_process_group(self._group)


class TwoLevels:
    """torch.distributed in two levels, for hosts of several ranks: a reduce-scatter inside the
    host, an all-reduce of each part between hosts, an all-gather inside the host; in the pieces
    that BytePS uses, so that one level works while the other does."""

    sums = True

    def __init__(self, name: str, device: torch.device) -> None:
        from byteps.torch import nodes

        self._nodes, self._layout = nodes, _layout()
        rank = dist.get_rank()
        if not self._layout.per_host:
            raise ValueError("hosts have different numbers of ranks: there are no two levels")
        self._node = nodes.groups.get(self._layout.on_host_of(rank), device)
        across = {self._layout.across(r) for r in range(dist.get_world_size())}
        made = {ranks: dist.new_group(ranks, backend=name) for ranks in sorted(across)}
        self._across = made[self._layout.across(rank)]
        self._local = self._layout.local_index(rank)

    def reduce(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        from byteps.torch.pieces import whole_pieces

        under_way = []
        for tensor in tensors:
            per_host = self._node.size
            count = self._nodes.piece_count(tensor.nbytes // per_host)
            for piece in whole_pieces(tensor.numel(), per_host, count):
                (ranges,) = piece.scatters
                begin, length = ranges[0][0], piece.length
                whole = tensor[begin : ranges[-1][1]]
                if len(whole) < per_host * length:
                    whole = torch.nn.functional.pad(whole, (0, per_host * length - len(whole)))
                part = whole[self._local * length : (self._local + 1) * length]
                self._node.reduce_scatter(part, whole)
                work = dist.all_reduce(part, group=self._across, async_op=True)
                under_way.append((tensor[begin : ranges[-1][1]], whole, part, work))
        for target, whole, part, work in under_way:
            work.wait()
            self._node.all_gather(whole, part)
            if whole.data_ptr() != target.data_ptr():
                target.copy_(whole[: len(target)])

    def form(self, wire: str) -> str:
        return SAME

    def close(self) -> None:
        self._nodes.groups.forget()


def _layout() -> Any:
    """The hosts of all ranks."""
    from byteps.torch import nodes

    names: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(names, nodes.host_name())
    return nodes.HostLayout.of(range(len(names)), [str(name) for name in names])


class PushPull:
    """BytePS; tensors are dealt to the servers as Megatron's buckets are, one after the other, and
    summed inside each host first where ranks share one."""

    sums = True

    def __init__(self, device: torch.device) -> None:
        import byteps.torch as bps
        from byteps.torch import nodes

        self._bps, self._nodes = bps, nodes
        bps.init()
        self._layout = layout = _layout()
        self._node = None
        if len(layout.hosts) > 1 and (layout.per_host or 1) > 1:
            self._node = nodes.groups.get(layout.on_host_of(dist.get_rank()), device)

    def reduce(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        if self._node is not None:
            self._reduce_node_first(tensors, label, wire)
            return
        from byteps.torch import engine
        from byteps.torch import wire as wires

        form = wires.of(tensors[0].dtype, None if wire == SAME else wire)
        handles, partitions = [], 0
        for index, tensor in enumerate(tensors):
            handle = self._bps.push_pull_async_inplace(
                tensor,
                average=False,
                name=f"{label}.{index}",
                priority=-index,
                placement=partitions,
                wire_dtype=form,
            )
            handles.append(handle)
            nbytes = form.nbytes(tensor.numel())
            partitions += engine.partition_count(nbytes, wire_dtype=form)
        for handle in handles:
            self._bps.synchronize(handle)

    def form(self, wire: str) -> str:
        return wire

    def _reduce_node_first(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        from byteps.torch.pieces import whole_pieces

        pending, partitions, rank = [], 0, dist.get_rank()
        assert self._node is not None
        for index, tensor in enumerate(tensors):
            count = self._nodes.piece_count(tensor.nbytes // self._node.size)
            one = self._nodes.NodeSum(
                name=f"{label}.{index}",
                layout=self._layout,
                node=self._node,
                pieces=tuple(whole_pieces(tensor.numel(), self._node.size, count)),
                priority=-index,
                placement=partitions,
            )
            pending.append(one.start(tensor))
            partitions += sum(push.partitions for push in one.pushes(rank, tensor.element_size()))
        for begun in pending:
            begun.wait()

    def close(self) -> None:
        self._nodes.groups.forget()
        self._bps.shutdown()


def make(name: str, device: str = "cpu", sockets: Mapping[str, Any] | None = None) -> Backend:
    """The backend of that name, connected to the other ranks, for tensors on that device.

    ``sockets`` says to what the backend ``sockets`` connects: the arguments of its class.
    """
    if name == "sockets":
        return Sockets(**(sockets or {}))
    if name == "byteps":
        return PushPull(torch.device(device))
    if name.endswith(_NODES):
        return TwoLevels(name.removesuffix(_NODES), torch.device(device))
    if name.endswith(_FP8):
        from bench.pushpull.fp8 import Fp8

        return Fp8(name.removesuffix(_FP8))
    return AllReduce(name)
