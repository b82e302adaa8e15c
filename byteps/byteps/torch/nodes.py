"""Sums over ranks that share hosts: inside each host first, then between the hosts.

If each of the r ranks of a host pushed a whole tensor, the host's NIC would carry r times the
bytes. Instead, the ranks of a host first reduce-scatter the tensor among themselves (NVLink, or
shared memory). Then each rank pushes its part, and pulls the sum of this part over the ranks of the
same local index on all hosts. Finally an all-gather inside the host puts the parts together. So the
NIC carries the tensor once each way. With a sharded optimizer, a part consists of the shards that
the ranks of one local index own; each rank pulls its own shard, and nothing is gathered.

A tensor is cut into a few pieces, so that one piece is summed inside the host while others are on
the network. On a GPU all work is queued on a separate stream and :meth:`NodeSum.start` returns at
once. On the CPU the sum inside the host is done when `start` returns.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from byteps.torch import engine, operations, ops, session, wire
from byteps.torch.figures import setting
from byteps.torch.names import Names
from byteps.torch.node_groups import (
    NodeGroup,
    NodeGroups,
    Piece,
    Range,
    are_even,
    groups,
    longest,
    on_side_stream,
    wait_for_side_stream,
    whole_pieces,
)
from byteps.torch.spans import Wait
from byteps.torch.wire import Wire
from byteps.torch.world import HostLayout, host_name

__all__ = [
    "PIECES",
    "HostLayout",
    "NodeGroup",
    "NodeGroups",
    "NodeSum",
    "PendingNodeSum",
    "Push",
    "gather",
    "groups",
    "host_name",
    "piece_count",
    "scatter",
    "setting",
    "whole_sum",
]


PIECES = 8
"""Most pieces per tensor. A piece has at least BYTEPS_NODE_PIECE_BYTES."""


def piece_count(part_bytes: int) -> int:
    """Return the number of pieces for a tensor of which each rank pushes `part_bytes` bytes."""
    return max(1, min(PIECES, part_bytes // setting("BYTEPS_NODE_PIECE_BYTES", int)))


def scatter(
    flat: torch.Tensor, piece: Piece, node: NodeGroup, local: int, *, in_order: bool = False
) -> torch.Tensor:
    """Sum a piece of `flat` inside the host; return the values that this rank pushes, as a view of
    `flat` if possible.

    With `in_order` the sum of an element depends neither on the element's position nor on how the
    ranks are connected. (The sum of only two values never does.)
    """
    lengths = [longest(ranges) for ranges in piece.scatters]
    if piece.is_in_place:
        begin, end = piece.scatters[0][local]
        part = flat[begin:end]
    else:
        part = flat.new_empty(sum(lengths))
    add = node.add_in_order if in_order and node.size > 2 else node.reduce_scatter
    offset = 0
    for ranges, length in zip(piece.scatters, lengths, strict=True):
        add(part[offset : offset + length], _side_by_side(flat, ranges, length))
        offset += length
    return part


def gather(target: torch.Tensor, piece: Piece, part: torch.Tensor, node: NodeGroup) -> None:
    """Gather the host's parts of a piece into `target`, which has the piece's length."""
    (ranges,) = piece.scatters
    if are_even(ranges):
        node.all_gather(target, part)
        return
    whole, first = part.new_empty(len(part) * len(ranges)), ranges[0][0]
    node.all_gather(whole, part)
    for index, (begin, end) in enumerate(ranges):
        at = index * len(part)
        target[begin - first : end - first].copy_(whole[at : at + end - begin])


@dataclass(frozen=True, kw_only=True)
class Push:
    """A push-pull that a rank makes for a piece."""

    name: str
    nbytes: int
    piece_of: int
    """Bytes of the whole tensor that the rank pushes. Partitions of a piece are as long as if the
    whole were pushed at once."""
    group: tuple[int, ...]
    placement: int
    wire: Wire = torch.float32

    @functools.cached_property
    def partitions(self) -> int:
        return engine.partition_count(self.nbytes, piece_of=self.piece_of, wire_dtype=self.wire)

    def bytes_per_server(self) -> list[int]:
        """Return the bytes for each server, in the order of the servers' ranks."""
        return engine.bytes_per_server(
            self.nbytes,
            name=self.name,
            group=self.group,
            placement=self.placement,
            piece_of=self.piece_of,
            wire_dtype=self.wire,
        )


@dataclass(frozen=True, kw_only=True)
class NodeSum:
    """Sum of a tensor over ranks on several hosts. It can be started any number of times."""

    name: str
    """Name of the sum: different for each tensor, the same on all ranks."""
    layout: HostLayout
    """Layout with several hosts, all with the same number of ranks."""
    node: NodeGroup
    """Ranks of this host, in the order of the layout."""
    pieces: tuple[Piece, ...]
    average: bool = False
    """Whether to average over all ranks of the layout. Values are divided by the number of ranks
    per host before they are added, and by the number of hosts after."""
    priority: int = 0
    placement: int = 0
    wire_dtype: Wire | None = None
    """Type in which the tensor travels between hosts; None: the tensor's own type. Inside the host,
    values are added in the tensor's own type."""
    in_order: bool = False
    """Whether servers add in the order of hosts, not of arrival."""

    def pushes(self, rank: int, element_size: int) -> list[Push]:
        """Return the push-pulls of a rank, one per piece."""
        # The session is part of the key, because another job may cut tensors differently.
        key = rank, element_size, session.number()
        if key not in self._pushes:
            self._pushes[key] = self._make_pushes(rank, element_size)
        return self._pushes[key]

    @functools.cached_property
    def _pushes(self) -> dict[tuple[int, int, int], list[Push]]:
        return {}

    def _make_pushes(self, rank: int, element_size: int) -> list[Push]:
        local, across = self.layout.local_index(rank), self.layout.across(rank)
        placement, pushes = self.placement + local, []
        for index, piece in enumerate(self.pieces):
            push = Push(
                name=f"{self.name}/part{local}of{self.node.size}/piece{index}",
                nbytes=self._nbytes(piece.length, element_size),
                piece_of=self._nbytes(self.length, element_size),
                group=across,
                placement=placement,
                wire=torch.float32 if self.wire_dtype is None else self.wire_dtype,
            )
            pushes.append(push)
            placement += push.partitions
        return pushes

    def take_names(self, rank: int, element_size: int, owner: object = None) -> Names:
        """Take the names under which a rank pushes. The returned object releases them."""
        pushes = self.pushes(rank, element_size)
        return Names(*(push.name for push in pushes), group=pushes[0].group, owner=owner)

    def _nbytes(self, numel: int, element_size: int) -> int:
        if self.wire_dtype is None:
            return numel * element_size
        return wire.of(torch.float32, self.wire_dtype).nbytes(numel)

    @functools.cached_property
    def length(self) -> int:
        """Number of elements that a rank pushes."""
        return sum(piece.length for piece in self.pieces)

    def declarations(
        self, rank: int, dtype: torch.dtype, device: torch.device
    ) -> list[engine.TensorDeclaration]:
        """Return a rank's declarations, for `bps.declare`, of a tensor of this type and device."""
        return [
            engine.TensorDeclaration(
                name=push.name,
                dtype=dtype,
                numel=piece.length,
                average=self.average,
                group=push.group,
                placement=push.placement,
                wire_dtype=self.wire_dtype,
                device=device,
                piece_of=self.length,
                in_order=self.in_order,
            )
            for piece, push in zip(self.pieces, self.pushes(rank, dtype.itemsize), strict=True)
        ]

    def start(self, tensor: torch.Tensor, *, streamed: bool = False) -> PendingNodeSum:
        """Start summing a contiguous tensor in place.

        All ranks of a host call this in the same order. Afterwards, elements whose sum this rank
        does not need are undefined.

        Args:
            tensor: a tensor of the length for which the pieces were cut.
            streamed: on a GPU, streams wait for the servers' answers: see `operations.start`.

        Raises:
            BytePSError: the job failed, or members disagree about the tensor.
            RuntimeError: a rank of the host was lost.
        """
        flat, rank = tensor.view(-1), session.rank()
        local, pending = self.layout.local_index(rank), []
        pushes = self.pushes(rank, flat.element_size())
        push_pull = operations.start_streamed_inplace if streamed else ops.push_pull_async_inplace
        with torch.no_grad(), on_side_stream(flat):
            if self.average:
                flat.div_(self.node.size)
            for piece, push in zip(self.pieces, pushes, strict=True):
                part = scatter(flat, piece, self.node, local)
                handle = push_pull(
                    part,
                    average=self.average,
                    name=push.name,
                    priority=self.priority,
                    placement=push.placement,
                    group=push.group,
                    pull=piece.wanted,
                    wire_dtype=self.wire_dtype,
                    piece_of=self.length,
                    in_order=self.in_order,
                )
                pending.append((piece, part, handle))
        return PendingNodeSum(flat=flat, node=self.node, local=local, pending=pending)


def whole_sum(
    name: str,
    layout: HostLayout,
    like: torch.Tensor,
    *,
    average: bool,
    wire_dtype: Wire | None,
    known: Sequence[dist.ProcessGroup] = (),
    purpose: str = "",
) -> NodeSum:
    """Return the sum of a tensor that every rank needs as a whole.

    All ranks of a host call this in the same order.

    Args:
        name, layout, average, wire_dtype: see `NodeSum`.
        like: a tensor of the same length, type and device.
        known: groups of torch.distributed. A group of this host's ranks is reused.
        purpose: purpose of the group of this host's ranks: see `NodeGroups.get`.
    """
    ranks = layout.on_host_of(session.rank())
    nbytes = wire.of(like.dtype, wire_dtype).nbytes(like.numel())
    cut = whole_pieces(like.numel(), len(ranks), piece_count(nbytes // len(ranks)))
    return NodeSum(
        name=name,
        layout=layout,
        node=groups.get(ranks, like.device, known, purpose),
        pieces=tuple(cut),
        average=average,
        wire_dtype=wire_dtype,
    )


@dataclass(kw_only=True)
class PendingNodeSum:
    """Sum in flight, and the tensors that must live until it ends."""

    flat: torch.Tensor
    node: NodeGroup
    local: int
    pending: list[tuple[Piece, torch.Tensor, int]]

    @property
    def handles(self) -> list[int]:
        """Handles of the sums that were not waited for."""
        return [handle for _, _, handle in self.pending]

    def wait(self) -> None:
        """Wait until the sums are there. On a GPU only the current stream waits. A second call does
        nothing.

        All ranks of a host call this in the same order.

        Raises:
            BytePSError: a push-pull failed; the text names the peer.
            RuntimeError: a rank of the host was lost.
        """
        if not self.pending:
            return
        with Wait("byteps.wait, gather in the host", self.flat.device):
            with on_side_stream(self.flat):
                self.receive(self.node)
            wait_for_side_stream(self.flat)

    def receive(self, gatherer: NodeGroup) -> None:
        """Do the same as `wait`, in the current stream. `gatherer`: group of this host's ranks that
        gathers the parts.

        If streams wait for servers, `gatherer` must not be `node`, because collectives of one group
        wait for each other.
        """
        pending, self.pending = self.pending, []
        with torch.no_grad():
            for piece, part, handle in pending:
                ops.synchronize(handle)
                if piece.gather:
                    (ranges,) = piece.scatters
                    gather(self.flat[ranges[0][0] : ranges[-1][1]], piece, part, gatherer)
                elif piece.wanted is not None and not _is_view(part, self.flat):
                    self._keep(piece, part)

    def _keep(self, piece: Piece, part: torch.Tensor) -> None:
        """Copy the elements that this rank needs to their place in the tensor."""
        assert piece.wanted is not None
        offset = 0
        for ranges in piece.scatters:
            begin, end = ranges[self.local]
            if piece.wanted == (offset, offset + end - begin) and end > begin:
                self.flat[begin:end].copy_(part[offset : offset + end - begin])
            offset += longest(ranges)


def _side_by_side(flat: torch.Tensor, ranges: Sequence[Range], length: int) -> torch.Tensor:
    """Return the ranges laid end to end, each padded with zeros. The result is a view if they
    already lie so."""
    adjacent = all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    if adjacent and are_even(ranges):
        return flat[ranges[0][0] : ranges[-1][1]]
    copy = flat.new_zeros(length * len(ranges))
    for index, (begin, end) in enumerate(ranges):
        copy[index * length : index * length + end - begin].copy_(flat[begin:end])
    return copy


def _is_view(part: torch.Tensor, flat: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@dataclass(frozen=True, kw_only=True)
class HostRanks:
    """Ranks of this host. All of these ranks call the methods in the same order."""

    group: NodeGroup
    local: int
    """This rank's index among the ranks of this host."""
    average: bool = False
    """Whether gradients are divided by the number of these ranks before they are added."""
    in_order: bool = False
    """See `nodes.scatter`."""

    def scatter(self, gradients: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Sum a piece of `gradients`. Return this rank's shard of the sum, as a view of `gradients`
        if possible."""
        return scatter(gradients, piece, self.group, self.local, in_order=self.in_order)

    def gather(self, target: torch.Tensor, piece: Piece, shard: torch.Tensor) -> None:
        """Gather the ranks' shards of a piece into `target`, which has the piece's length."""
        gather(target, piece, shard, self.group)

    def of_each(self, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return every rank's `own`, in the order of ranks. All have one dimension and the same
        length."""
        gathered = own.new_empty(self.group.size * own.numel())
        with self.stream(own):
            self.group.all_gather(gathered, own)
        return gathered.chunk(self.group.size)

    @contextlib.contextmanager
    def stream(self, tensor: torch.Tensor, *, joins: bool = True) -> Iterator[None]:
        """Return a context in which GPU work is queued on the stream of the collectives inside the
        host.

        `joins`: at the end of the context, the caller's stream waits for this work.
        """
        with torch.no_grad(), on_side_stream(tensor):
            yield
        if joins:
            wait_for_side_stream(tensor)
