"""The ranks of a host: the pieces of a tensor that they sum before they push, and their
collectives.

One piece is on the network while the host sums another.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from byteps.launcher import meeting
from byteps.torch import session
from byteps.torch.figures import setting
from byteps.torch.streams import stream_for

Range = tuple[int, int]
"""First element, and last element plus one."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Part of a tensor that is summed separately. It is the same on all ranks, except `wanted`."""

    scatters: tuple[tuple[Range, ...], ...]
    """Reduce-scatters inside the host. Each is given by the ranges of elements that the ranks of
    local index 0, 1, ... get."""
    wanted: Range | None
    """Range whose sum this rank pulls, within this rank's scattered elements laid end to end. None:
    all of these elements."""
    gather: bool
    """Whether all ranks of the host need the whole piece."""

    @functools.cached_property
    def length(self) -> int:
        """Number of elements that a rank pushes."""
        return sum(longest(ranges) for ranges in self.scatters)

    @functools.cached_property
    def is_in_place(self) -> bool:
        """Whether a rank pushes its part directly from the tensor's memory."""
        return len(self.scatters) == 1 and are_even(self.scatters[0])


def longest(ranges: Sequence[Range]) -> int:
    """Length of the longest range, in elements."""
    return max(end - begin for begin, end in ranges)


def are_even(ranges: Sequence[Range]) -> bool:
    """Whether all ranges have the same length."""
    return len({end - begin for begin, end in ranges}) == 1


def whole_pieces(elements: int, per_host: int, pieces: int) -> list[Piece]:
    """Cut a tensor that every rank needs as a whole into at most `pieces` pieces.

    The length of every piece is a multiple of `per_host`, except perhaps that of the last piece,
    whose last ranges are then shorter.
    """
    each = max(1, elements // pieces // per_host) * per_host
    begins = [index * each for index in range(min(pieces, -(-elements // each)))]
    cut = []
    for begin, end in zip(begins, [*begins[1:], elements], strict=True):
        part = -(-(end - begin) // per_host)
        edges = [min(begin + index * part, end) for index in range(per_host + 1)]
        ranges = tuple(itertools.pairwise(edges))
        cut.append(Piece(scatters=(ranges,), wanted=None, gather=True))
    return cut


def shard_pieces(
    elements: int, owned: Sequence[Sequence[int]], host: int, local: int, pieces: int
) -> list[Piece] | None:
    """Cut a tensor of equal shards, of which each rank needs one.

    Args:
        elements: number of elements, a multiple of the number of shards.
        owned: for each host, the index of the shard that each of its ranks owns.
        host, local: this rank's indices in `owned`.
        pieces: approximate number of pieces.

    Returns:
        the pieces. None if ranks of different local indices own the same shard, or a shard has no
        owner: the pushed parts would then overlap or be incomplete.
    """
    per_host = len(owned[0])
    parts = [sorted({shards[index] for shards in owned}) for index in range(per_host)]
    shards = sum(len(part) for part in parts)
    if len({len(part) for part in parts}) != 1 or {s for part in parts for s in part} != set(
        range(shards)
    ):
        return None
    size, slabs, own_shard = elements // shards, len(parts[0]), owned[host][local]
    if slabs >= pieces:
        groups = [range(slabs * p // pieces, slabs * (p + 1) // pieces) for p in range(pieces)]
        return [_slab_piece(parts, group, (0, size), size, local, own_shard) for group in groups]
    cuts = max(1, min(pieces // slabs, size))
    edges = [size * c // cuts for c in range(cuts + 1)]
    return [
        _slab_piece(parts, (slab,), edge, size, local, own_shard)
        for slab in range(slabs)
        for edge in itertools.pairwise(edges)
    ]


def _slab_piece(
    parts: Sequence[Sequence[int]],
    slabs: Sequence[int],
    cut: Range,
    size: int,
    local: int,
    own_shard: int,
) -> Piece:
    """Make a piece of the same range of several shards of each rank. Its t-th reduce-scatter has
    the t-th shard of every rank."""
    begin, end = cut
    scatters = [
        tuple((part[slab] * size + begin, part[slab] * size + end) for part in parts)
        for slab in slabs
    ]
    wanted = (0, 0)
    for index, slab in enumerate(slabs):
        if parts[local][slab] == own_shard:
            wanted = (index * (end - begin), (index + 1) * (end - begin))
    return Piece(scatters=tuple(scatters), wanted=wanted, gather=False)


# Collectives, and the side stream in which a GPU runs them.


_TAG = 0x6270
"""Tag of messages between two ranks of a host; unlikely to be used by programs."""


class NodeGroup:
    """Collectives among the ranks of a host, of contiguous tensors of one dimension.

    On the CPU, values go directly to the rank that adds or keeps them. (gloo's reduce-scatter is an
    all-reduce of a copy, and its all-gather passes parts from rank to rank.)
    """

    def __init__(self, group: Any, size: int) -> None:
        """`group`: a ProcessGroup, or a backend of a ProcessGroup, with `size` ranks."""
        self._group = group
        self.size = size

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Sum all ranks' `source`; put this rank's part of the sum into `output`."""
        if source.is_cuda:
            self._group._reduce_scatter_base(output, source, dist.ReduceScatterOptions()).wait()
        else:
            self.add_in_order(output, source)

    def add_in_order(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Do the same as `reduce_scatter`, but add in the order of ranks. Half types are added in
        fp32 and rounded once."""
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
        """Concatenate the parts of all ranks into `output`."""
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
    """Creates and caches the node groups of a process.

    All ranks of the job must call ``torch.distributed.new_group`` in the same order, or the calling
    ranks must have made the same number of groups before. Ranks that wrap different models can do
    neither, so this class does not use it. Instead the members of a group meet in
    torch.distributed's store (:mod:`byteps.launcher.meeting`).
    """

    def __init__(self) -> None:
        self._store: Any = None
        self._made: dict[tuple[str, tuple[int, ...], str, str], NodeGroup] = {}

    def get(
        self,
        ranks: tuple[int, ...],
        device: torch.device,
        known: Sequence[dist.ProcessGroup] = (),
        purpose: str = "",
        role: str = "",
    ) -> NodeGroup:
        """Return the group of these ranks, which is one of `known` if possible. All members call
        this.

        Blocks until all members have called it. Collectives use NCCL for a CUDA device, otherwise
        gloo. Each purpose and role has a group of its own, so that their collectives do not wait
        for each other.

        Raises:
            RuntimeError: a member did not call within BYTEPS_OP_TIMEOUT_S.
        """
        store = dist.distributed_c10d._get_default_store()
        # A new store means that torch.distributed was initialized again.
        if store is not self._store:
            self._store, self._made = store, {}
        key, first = (device.type, ranks, purpose, role), session.first_rank()
        if key not in self._made:
            for group in known:
                if tuple(first + r for r in dist.get_process_group_ranks(group)) == ranks:
                    self._made[key] = NodeGroup(group, len(ranks))
                    return self._made[key]
            if purpose:
                # The clone has a connection of its own. On a shared one, a thread that waits in the
                # store blocks the others, for which this thread may be waiting elsewhere.
                store = store.clone()  # type: ignore[attr-defined]  # not in torch's stub
            self._made[key] = NodeGroup(_backend(ranks, device, store, purpose + role), len(ranks))
        return self._made[key]

    def forget(self, purpose: str | None = None) -> None:
        """Drop the groups of a purpose, or all groups; later calls of `get` create new ones."""
        for key in list(self._made):
            if purpose in (None, key[2]):
                self._made.pop(key, None)


def _backend(ranks: tuple[int, ...], device: torch.device, store: Any, purpose: str) -> Any:
    # This code uses only torch.distributed, because a benchmark sums over node groups without a
    # session.
    index = ranks.index(session.first_rank() + dist.get_rank())
    seconds = _op_timeout_s()
    timeout = timedelta(seconds=seconds)
    name = f"node{purpose}/{device.type}/{'-'.join(map(str, ranks))}"
    try:
        prefix = meeting.meet(store, name, index, len(ranks), time.monotonic() + seconds)
    except meeting.AbsentError as error:
        absent = [ranks[member] for member in error.members]
        raise RuntimeError(
            f"ranks {absent} of this host did not call the reduction of ranks {list(ranks)} within "
            f"{seconds:g} s (BYTEPS_OP_TIMEOUT_S)"
        ) from None
    own = dist.PrefixStore(prefix, store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(own, index, len(ranks), options)
    return dist.ProcessGroupGloo(own, index, len(ranks), timeout)


def _op_timeout_s() -> float:
    return setting("BYTEPS_OP_TIMEOUT_S", float)


groups = NodeGroups()
"""Node groups of this process."""


@contextlib.contextmanager
def on_side_stream(tensor: torch.Tensor) -> Iterator[None]:
    """On a GPU, queue the context's work on a separate stream, after the caller's stream's work so
    far."""
    if not tensor.is_cuda:
        yield
        return
    stream = stream_for("node groups", tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        yield


def wait_for_side_stream(tensor: torch.Tensor) -> None:
    """On a GPU, make the caller's stream wait for the work that was queued in `on_side_stream`."""
    if tensor.is_cuda:
        stream = stream_for("node groups", tensor.device)
        torch.cuda.current_stream(tensor.device).wait_stream(stream)
