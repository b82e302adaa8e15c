"""What a rank sends of a flat tensor of parameters, and what servers keep of it.

Where the ranks of a host sum first, each sends a part of every piece, and reads and loads those. A
rank that has its host for itself sends one part, the whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import byteps.torch as bps
import torch
from byteps.torch.node_groups import NodeGroup, on_side_stream, wait_for_side_stream
from byteps.torch.pieces import Piece, Range
from byteps.torch.server_state import Rule, Segment, ServerTensor

_GATHERED_AT_ONCE = 1 << 22
"""Elements: memory of this size, for each rank of a host, is taken while what servers keep is put
together."""


@dataclass(frozen=True, kw_only=True)
class OnHost:
    """The ranks of this host, which sum first."""

    group: NodeGroup
    local: int
    """This rank's place among them."""
    average: bool = False
    """Gradients are divided by the number of these ranks before they are added."""
    in_order: bool = False
    """See `nodes.scatter`."""


@dataclass(kw_only=True)
class Part:
    """What this rank sends of one piece of the tensor."""

    piece: Piece
    tensor: ServerTensor
    sent: torch.Tensor | None = None
    """The gradients as they travel. What comes down may overwrite them."""

    @property
    def whole(self) -> Range:
        """The elements of the piece."""
        (ranges,) = self.piece.scatters
        return ranges[0][0], ranges[-1][1]

    def mine(self, local: int) -> Range:
        """The elements that this rank sends; it may send zeros behind them."""
        (ranges,) = self.piece.scatters
        return ranges[local]


class KeptTensor:
    """A flat tensor of parameters that servers keep, one part by each rank of a host.

    The ranks of a host call `of_host` and `gather` in the same order.
    """

    def __init__(
        self,
        declarations: Sequence[bps.TensorDeclaration],
        rule: Rule,
        segments: Sequence[Segment],
        *,
        pieces: Sequence[Piece] = (),
        host: OnHost | None = None,
        **servers: bool,
    ) -> None:
        """Tell the servers.

        Args:
            declarations: of what this rank sends, in the type in which it travels: one for each of
                `pieces`, or one of the whole tensor.
            rule: how parameters are updated.
            segments: which elements belong to which group; they cover the tensor.
            pieces: as `whole_pieces` cuts the tensor for the ranks of `host`.
            host: None where this rank sums with nobody first.
            servers: what they are asked to do; see :class:`ServerTensor`.

        Raises:
            BytePSError: a server refuses, or has too little memory.
        """
        self.numel = segments[-1][0]
        self.is_shared = host is not None
        """Whether the ranks of a host send a part each."""
        self._host, self._dtype = host, declarations[0].dtype
        self.local = 0 if host is None else host.local
        """This rank's place among these."""
        self._device = torch.device(declarations[0].device)
        if host is None:
            whole = ((0, self.numel),)
            pieces = [Piece(scatters=(whole,), wanted=None, gather=False)]
        self._parts = []
        for piece, declaration in zip(pieces, declarations, strict=True):
            (ranges,) = piece.scatters
            own = cut_segments(segments, ranges[self.local], piece.length)
            tensor = ServerTensor(declaration, rule, own, **servers)
            self._parts.append(Part(piece=piece, tensor=tensor))

    @property
    def squares(self) -> list[float]:
        """After `push_norm` or `push_try`: squares of what this rank sends and counts, in parts."""
        return [value for part in self._parts for value in part.tensor.squares]

    @property
    def zeros(self) -> int:
        """After `push_norm` or `push_try`: how many gradients that this rank sends, and counts, are
        0, if servers count them."""
        return sum(part.tensor.zeros for part in self._parts)

    # ------------------------------------------------------------------- what becomes of a step

    def keep(self) -> None:
        """See ServerTensor."""
        for part in self._parts:
            part.tensor.keep()

    def drop(self) -> None:
        """See ServerTensor."""
        for part in self._parts:
            part.tensor.drop()

    def give_up(self) -> None:
        """See ServerTensor."""
        for part in self._parts:
            part.tensor.give_up()

    # ------------------------------------------------------------------- what servers keep

    def load(self, slot: int, values: torch.Tensor) -> None:
        """Put the fp32 values of this rank's parts, out of those of the tensor, into a slot."""
        for part in self._parts:
            begin, end = part.mine(self.local)
            own = values[begin:end]
            if end - begin < part.piece.length:
                own = torch.nn.functional.pad(own, (0, part.piece.length - (end - begin)))
            part.tensor.load(slot, own)

    @property
    def mine(self) -> list[Range]:
        """The elements that this rank sends."""
        return [part.mine(self.local) for part in self._parts]

    def read(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """The fp32 values of a slot, of elements out of one range of `mine`, on the CPU."""
        for part in self._parts:
            first, last = part.mine(self.local)
            if first <= begin <= end <= last:
                return part.tensor.read(slot, begin - first, end - first)
        raise ValueError(f"elements {begin} to {end} are not of one part of this rank: {self.mine}")

    def gather(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """The fp32 values of a slot, of any elements, on the CPU. All ranks of a host call it with
        the same arguments."""
        if self._host is None:
            return self.read(slot, begin, end)
        flat = torch.empty(end - begin)
        for part in self._parts:
            (ranges,) = part.piece.scatters
            # Of each rank's part the elements that are wanted.
            wanted = [(max(begin - b, 0), min(end, e) - b) for b, e in ranges]
            targets = [b - begin for b, _ in ranges]
            for first, of_each in self._turns(part, slot, wanted):
                for target, (low, high), values in zip(targets, wanted, of_each, strict=True):
                    a = max(low, first)
                    z = max(a, min(high, first + len(values)))  # there may be none of it
                    flat[target + a : target + z].copy_(values[a - first : z - first])
        return flat

    def _turns(
        self, part: Part, slot: int, wanted: Sequence[Range]
    ) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
        """What every rank of the host has of its part, from the first element to the last that is
        `wanted` of any: the first element of each turn, and the values by rank."""
        assert self._host is not None
        held = [cut for cut in wanted if cut[0] < cut[1]]
        if not held:
            return
        first, last = min(cut[0] for cut in held), max(cut[1] for cut in held)
        own = part.tensor.read(slot, first, last)
        for place in range(0, last - first, _GATHERED_AT_ONCE):
            mine = own[place : place + _GATHERED_AT_ONCE].to(self._device)
            yield first + place, self._of_each(mine).chunk(self._host.group.size)

    # ------------------------------------------------------------------- inside the host

    def of_host(self, values: Sequence[float]) -> list[list[float]]:
        """What each rank of the host gives, in one order on all of them."""
        if self._host is None:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64, device=self._device)
        return self._of_each(mine).view(self._host.group.size, -1).tolist()

    def _of_each(self, mine: torch.Tensor) -> torch.Tensor:
        """What the ranks of the host give, one after the other."""
        assert self._host is not None
        gathered = mine.new_empty(self._host.group.size * mine.numel())
        with self._beside(mine):
            self._host.group.all_gather(gathered, mine)
        return gathered

    @contextlib.contextmanager
    def _beside(self, tensor: torch.Tensor, *, joins: bool = True) -> Iterator[None]:
        """Where there are collectives inside the host, on the stream of these. `joins`: the
        caller's stream then waits for it."""
        if self._host is None:
            yield
            return
        with torch.no_grad(), on_side_stream(tensor):
            yield
        if joins:
            wait_for_side_stream(tensor)


def cut_segments(segments: Sequence[Segment], cut: Range, length: int) -> list[Segment]:
    """The segments of some elements of a tensor, and of zeros behind them up to `length`, which do
    not count."""
    begin, end = cut
    found: list[Segment] = []
    before = 0
    for last, group, counts in segments:
        if before < end and last > begin and begin < end:
            found.append((min(last, end) - begin, group, counts))
        before = last
    if end - begin < length:
        found.append((length, found[-1][1] if found else segments[0][1], False))
    return found
