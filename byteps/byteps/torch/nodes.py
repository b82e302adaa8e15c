"""Sums over ranks of which several share a host: inside the host first, then between the hosts.

A host whose r ranks each push a whole tensor sends r times its bytes through one network card. Here
the ranks of a host reduce-scatter the tensor among themselves (NVLink, or shared memory), each
pushes and pulls the sum of its part together with the ranks of the same local index on the other
hosts, and an all-gather inside the host puts the parts together. The card then carries the tensor
once each way. With a sharded optimizer a part consists of the shards that the ranks of one local
index own, each rank pulls its own shard, and nothing is gathered.

A tensor is cut into a few pieces, so that one piece is summed inside the host while others are on
the network. On a GPU all work is queued on a stream of its own and :meth:`NodeSum.start` returns at
once. On the CPU the sum inside the host is done when it returns.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from byteps.launcher import meeting
from byteps.torch import c_lib, engine
from byteps.torch.pieces import Piece, Range, are_even, longest

PIECES = 8
"""A tensor is cut into at most so many pieces, each of BYTEPS_NODE_PIECE_BYTES at least."""

_TAG = 0x6270
"""Of messages between two ranks of a host; another one than programs are likely to use."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """What tells this host from others: BYTEPS_HOST_ID, or the host name and the kernel's boot id.

    Ranks with the same name are taken to share a network card and to reach each other without it.
    """
    given = setting("BYTEPS_HOST_ID")
    if given:
        return given
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot}".strip()


def setting(name: str) -> str:
    """The value in force of a setting of byteps/base/config.cc, as text.

    Raises:
        BytePSError: a setting has a value that it may not have.
    """
    prefix = f"{name}="
    for line in c_lib.config().splitlines():
        if line.startswith(prefix):
            return line.removeprefix(prefix).removesuffix("  # default")
    raise KeyError(name)


# ----------------------------------------------------------------------------- ranks and hosts


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """How the ranks of a group are spread over hosts."""

    hosts: tuple[tuple[int, ...], ...]
    """Global ranks of each host, in the order of the group; hosts by their first rank's place."""

    @staticmethod
    def of(ranks: Sequence[int], names: Sequence[str]) -> HostLayout:
        """The layout of these ranks, of which each is on the host of the same place in `names`."""
        hosts: dict[str, list[int]] = {}
        for rank, name in zip(ranks, names, strict=True):
            hosts.setdefault(name, []).append(rank)
        return HostLayout(hosts=tuple(tuple(members) for members in hosts.values()))

    @functools.cached_property
    def per_host(self) -> int | None:
        """Ranks on each host; None where hosts have different numbers."""
        sizes = {len(members) for members in self.hosts}
        return sizes.pop() if len(sizes) == 1 else None

    def host_of(self, rank: int) -> int:
        """Which of `hosts` a rank is on. Raises ValueError for a rank that is no member."""
        return self._place(rank)[0]

    def _place(self, rank: int) -> tuple[int, int]:
        """Its host, and its place among the ranks of that."""
        if rank not in self._places:
            raise ValueError(f"rank {rank} is none of {self.hosts}")
        return self._places[rank]

    @functools.cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (host, local)
            for host, members in enumerate(self.hosts)
            for local, rank in enumerate(members)
        }

    def beside(self, rank: int) -> tuple[int, ...]:
        """The ranks of its host, itself among them."""
        return self.hosts[self.host_of(rank)]

    def local_index(self, rank: int) -> int:
        """Its place among the ranks of its host."""
        return self._place(rank)[1]

    def across(self, rank: int) -> tuple[int, ...]:
        """The ranks of the same local index, one a host. Only where `per_host` is not None."""
        return self._across[self.local_index(rank)]

    @functools.cached_property
    def _across(self) -> tuple[tuple[int, ...], ...]:
        """By local index: each the same object whenever it is asked for."""
        return tuple(zip(*self.hosts, strict=True))


# ----------------------------------------------------------------------------- inside the host


class NodeGroup:
    """Collectives among the ranks of a host, of contiguous tensors of one dimension.

    On the CPU values go straight to whoever adds or keeps them: gloo's reduce-scatter is an
    all-reduce of a copy, and its all-gather hands parts on from rank to rank.
    """

    def __init__(self, group: Any, size: int) -> None:
        """`group` is a ProcessGroup or a backend of one, with so many ranks."""
        self._group = group
        self.size = size

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Put the sum of every rank's part of `source` that belongs to this rank into `output`."""
        if source.is_cuda:
            self._group._reduce_scatter_base(output, source, dist.ReduceScatterOptions()).wait()
        else:
            self.add_in_order(output, source)

    def add_in_order(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """As `reduce_scatter`, but values are added in the order of ranks, wherever they lie, and
        those of half types in fp32 and rounded once."""
        received = torch.empty_like(source)
        options = dist.AllToAllOptions()
        sent = source.view(torch.uint8), received.view(torch.uint8)
        self._group.alltoall_base(sent[1], sent[0], [], [], options).wait()
        total, *others = received.chunk(self.size)
        if source.is_floating_point() and source.dtype.itemsize < 4:
            total = total.float()
        for other in others[:-1]:
            total += other
        if others:
            torch.add(total, others[-1], out=output)
        else:
            output.copy_(total)

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> None:
        """Put every rank's part into `output`, one after the other."""
        if part.is_cuda:
            self._group._allgather_base(output, part).wait()
            return
        own, places, works = self._group.rank(), output.chunk(self.size), []
        for distance in range(1, self.size):
            source, target = (own - distance) % self.size, (own + distance) % self.size
            works.append(self._group.recv([places[source]], source, _TAG))
            works.append(self._group.send([part], target, _TAG))
        if places[own].data_ptr() != part.data_ptr():
            places[own].copy_(part)
        for work in works:
            work.wait()


class NodeGroups:
    """Makes the groups of a process, each once.

    ``torch.distributed.new_group`` would have to be called by all ranks of the job in one order, or
    by ranks that have made equally many groups before; ranks that wrap different models do neither.
    So the members meet in torch.distributed's store (:mod:`byteps.launcher.meeting`).
    """

    def __init__(self) -> None:
        self._store: Any = None
        self._made: dict[tuple[str, tuple[int, ...]], NodeGroup] = {}

    def get(
        self,
        ranks: tuple[int, ...],
        device: torch.device,
        known: Sequence[dist.ProcessGroup] = (),
    ) -> NodeGroup:
        """The group of these ranks, one of `known` if it has them. All its members call this.

        Blocks until they have. Collectives run by NCCL for a CUDA device, else by gloo.

        Raises:
            RuntimeError: the others did not come within BYTEPS_OP_TIMEOUT_S.
        """
        store = dist.distributed_c10d._get_default_store()
        if store is not self._store:  # torch.distributed was started anew
            self._store, self._made = store, {}
        key = device.type, ranks
        if key not in self._made:
            for group in known:
                if tuple(dist.get_process_group_ranks(group)) == ranks:
                    self._made[key] = NodeGroup(group, len(ranks))
                    return self._made[key]
            self._made[key] = NodeGroup(_backend(ranks, device, store), len(ranks))
        return self._made[key]

    def forget(self) -> None:
        """Let go of all groups; later calls make new ones."""
        self._made.clear()


def _backend(ranks: tuple[int, ...], device: torch.device, store: Any) -> Any:
    place, seconds = ranks.index(dist.get_rank()), _op_timeout_s()
    timeout, name = timedelta(seconds=seconds), f"node/{device.type}/{'-'.join(map(str, ranks))}"
    try:
        prefix = meeting.meet(store, name, place, len(ranks), time.monotonic() + seconds)
    except meeting.AbsentError as error:
        absent = [ranks[member] for member in error.members]
        raise RuntimeError(
            f"ranks {absent} of this host did not come to sum with ranks {list(ranks)} within "
            f"{seconds:g} s (BYTEPS_OP_TIMEOUT_S)"
        ) from None
    own = dist.PrefixStore(prefix, store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(own, place, len(ranks), options)
    return dist.ProcessGroupGloo(own, place, len(ranks), timeout)


def _op_timeout_s() -> float:
    return float(setting("BYTEPS_OP_TIMEOUT_S"))


groups = NodeGroups()
"""Those of this process."""

_streams: dict[int, torch.cuda.Stream] = {}


@contextlib.contextmanager
def beside_the_caller(tensor: torch.Tensor) -> Iterator[None]:
    """On a GPU, queue work on a stream of ours, after what the caller's stream has by now."""
    if not tensor.is_cuda:
        yield
        return
    index = tensor.device.index
    if index not in _streams:
        _streams[index] = torch.cuda.Stream(tensor.device)
    stream = _streams[index]
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        yield


def await_beside(tensor: torch.Tensor) -> None:
    """On a GPU, have the caller's stream wait for what `beside_the_caller` has queued by now."""
    if tensor.is_cuda:
        stream = _streams[tensor.device.index]
        torch.cuda.current_stream(tensor.device).wait_stream(stream)


# ----------------------------------------------------------------------------- a piece's way


def piece_count(part_bytes: int) -> int:
    """Into how many pieces a tensor is cut of which each rank pushes so many bytes."""
    return max(1, min(PIECES, part_bytes // int(setting("BYTEPS_NODE_PIECE_BYTES"))))


def scatter(
    flat: torch.Tensor, piece: Piece, node: NodeGroup, local: int, *, in_order: bool = False
) -> torch.Tensor:
    """Sum a piece of `flat` inside the host; return what this rank pushes, in `flat` if it can be.

    With `in_order` the sum of an element does not depend on its place, nor on what the ranks are
    connected by. Two values have the same sum either way.
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
    """Put the parts that the host's ranks have of a piece into `target`, which has its length."""
    (ranges,) = piece.scatters
    if are_even(ranges):
        node.all_gather(target, part)
        return
    whole, first = part.new_empty(len(part) * len(ranges)), ranges[0][0]
    node.all_gather(whole, part)
    for index, (begin, end) in enumerate(ranges):
        place = index * len(part)
        target[begin - first : end - first].copy_(whole[place : place + end - begin])


# ----------------------------------------------------------------------------- the sum


@dataclass(frozen=True, kw_only=True)
class Push:
    """A push-pull of one rank."""

    name: str
    nbytes: int
    piece_of: int
    """Bytes that the rank pushes of the whole tensor: partitions are as long as that one's."""
    group: tuple[int, ...]
    placement: int

    @functools.cached_property
    def partitions(self) -> int:
        return engine.partition_count(self.nbytes, piece_of=self.piece_of)

    def bytes_per_server(self) -> list[int]:
        """In the order of the servers' ranks."""
        return engine.bytes_per_server(
            self.nbytes,
            name=self.name,
            group=self.group,
            placement=self.placement,
            piece_of=self.piece_of,
        )


@dataclass(frozen=True, kw_only=True)
class NodeSum:
    """The sum of one tensor over a group of ranks on several hosts, as often as wanted."""

    name: str
    """Another one for each tensor, the same on all ranks."""
    layout: HostLayout
    """With several hosts, and as many ranks on each."""
    node: NodeGroup
    """The ranks of this host, in the order of the layout."""
    pieces: tuple[Piece, ...]
    average: bool = False
    """Over all ranks of the layout, instead of the sum. Values are divided by the number of ranks
    on a host before they are added, and by the number of hosts after."""
    priority: int = 0
    placement: int = 0
    wire_dtype: torch.dtype | None = None
    """Type in which an fp32 or fp64 tensor travels between hosts; None: its own. Values inside the
    host are added in the tensor's own."""

    def pushes(self, rank: int, element_size: int) -> list[Push]:
        """What a rank sends to servers, a push-pull for each piece."""
        key = rank, element_size, engine.session()  # another job may cut tensors otherwise
        if key not in self._pushes:
            self._pushes[key] = self._make_pushes(rank, element_size)
        return self._pushes[key]

    @functools.cached_property
    def _pushes(self) -> dict[tuple[int, int, int], list[Push]]:
        return {}

    def _make_pushes(self, rank: int, element_size: int) -> list[Push]:
        local, across = self.layout.local_index(rank), self.layout.across(rank)
        size = element_size if self.wire_dtype is None else self.wire_dtype.itemsize
        place, pushes = self.placement + local, []
        for index, piece in enumerate(self.pieces):
            push = Push(
                name=f"{self.name}/part{local}of{self.node.size}/piece{index}",
                nbytes=piece.length * size,
                piece_of=self.length * size,
                group=across,
                placement=place,
            )
            pushes.append(push)
            place += push.partitions
        return pushes

    @functools.cached_property
    def length(self) -> int:
        """Elements that a rank pushes."""
        return sum(piece.length for piece in self.pieces)

    def declarations(
        self, rank: int, dtype: torch.dtype, device: torch.device
    ) -> list[engine.TensorDeclaration]:
        """What a rank tells the servers, for `bps.declare`, of a tensor of this type and place."""
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
            )
            for piece, push in zip(self.pieces, self.pushes(rank, dtype.itemsize), strict=True)
        ]

    def start(self, tensor: torch.Tensor) -> PendingNodeSum:
        """Start summing a contiguous tensor in place.

        Called by all ranks of a host in the same order. Where this rank does not want the sum of an
        element, the element's value is undefined afterwards.

        Raises:
            BytePSError: the job failed, or members disagree about the tensor.
            RuntimeError: a rank of the host was lost.
        """
        flat, rank = tensor.view(-1), dist.get_rank()
        local, pending = self.layout.local_index(rank), []
        pushes = self.pushes(rank, flat.element_size())
        with torch.no_grad(), beside_the_caller(flat):
            if self.average:
                flat.div_(self.node.size)
            for piece, push in zip(self.pieces, pushes, strict=True):
                part = scatter(flat, piece, self.node, local)
                handle = engine.start(
                    part,
                    part,
                    average=self.average,
                    name=push.name,
                    priority=self.priority,
                    placement=push.placement,
                    group=push.group,
                    pull=piece.wanted,
                    wire_dtype=self.wire_dtype,
                    piece_of=self.length,
                )
                pending.append((piece, part, handle))
        return PendingNodeSum(flat=flat, node=self.node, local=local, pending=pending)


@dataclass(kw_only=True)
class PendingNodeSum:
    """A sum under way, and the tensors that must live as long."""

    flat: torch.Tensor
    node: NodeGroup
    local: int
    pending: list[tuple[Piece, torch.Tensor, int]]

    def wait(self) -> None:
        """Wait until the sums are there, on a GPU for the current stream. Again: do nothing.

        Called by all ranks of a host in the same order.

        Raises:
            BytePSError: a push-pull failed; the text names the peer.
            RuntimeError: a rank of the host was lost.
        """
        pending, self.pending = self.pending, []
        if not pending:
            return
        with torch.no_grad(), beside_the_caller(self.flat):
            for piece, part, handle in pending:
                engine.synchronize(handle)
                if piece.gather:
                    (ranges,) = piece.scatters
                    gather(self.flat[ranges[0][0] : ranges[-1][1]], piece, part, self.node)
                elif piece.wanted is not None and not _is_view(part, self.flat):
                    self._keep(piece, part)
        await_beside(self.flat)

    def _keep(self, piece: Piece, part: torch.Tensor) -> None:
        """Copy the wanted elements to where they belong."""
        assert piece.wanted is not None
        offset = 0
        for ranges in piece.scatters:
            begin, end = ranges[self.local]
            if piece.wanted == (offset, offset + end - begin) and end > begin:
                self.flat[begin:end].copy_(part[offset : offset + end - begin])
            offset += longest(ranges)


def _side_by_side(flat: torch.Tensor, ranges: Sequence[Range], length: int) -> torch.Tensor:
    """The ranges one after the other, each filled up with zeros: a view where they lie so."""
    adjacent = all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    if adjacent and are_even(ranges):
        return flat[ranges[0][0] : ranges[-1][1]]
    copy = flat.new_zeros(length * len(ranges))
    for index, (begin, end) in enumerate(ranges):
        copy[index * length : index * length + end - begin].copy_(flat[begin:end])
    return copy


def _is_view(part: torch.Tensor, flat: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
