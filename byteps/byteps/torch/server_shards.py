"""What servers keep of a flat tensor of parameters, and which shards of it each rank sends.

Where the ranks of a host sum first, each sends a shard of every piece, and reads and loads those. A
rank that has its host for itself sends one shard, the whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from byteps.torch import wire
from byteps.torch.declarations import TensorDeclaration
from byteps.torch.pieces import Piece, Range
from byteps.torch.server_blocks import ShardBlocks
from byteps.torch.server_host import HostRanks
from byteps.torch.server_rule import Rule, Segment, cut_segments
from byteps.torch.server_tensor import ServerTensor

_GATHERED_AT_ONCE = 1 << 22
"""Elements: memory of this size, for each rank of a host, is taken while what servers keep is put
together."""


@dataclass(kw_only=True)
class Shard:
    """What this rank sends of one piece of the tensor."""

    piece: Piece
    tensor: ServerTensor
    whole: Range
    """The elements of the piece."""
    own: Range
    """The elements that this rank sends; it may send zeros behind them."""
    blocks: ShardBlocks | None = None
    """Where gradients travel in blocks of few bits."""
    sent: torch.Tensor | None = None
    """The gradients as they travel. What comes down may overwrite them."""


class ServerShards:
    """A flat tensor of parameters on the servers. The ranks of a host call `of_host` and `gather`
    in the same order."""

    def __init__(
        self,
        declarations: Sequence[TensorDeclaration],
        rule: Rule,
        segments: Sequence[Segment],
        *,
        pieces: Sequence[Piece] = (),
        host: HostRanks | None = None,
        **servers: bool,
    ) -> None:
        """Tell the servers.

        Args:
            declarations: of what this rank sends, in the type in which parameters come down: one
                for each of `pieces`, or one of the whole tensor. Where they name blocks of few
                bits, gradients go up in these, and what is added to the parameters comes down.
            rule: how parameters are updated.
            segments: which elements belong to which group; they cover the tensor.
            pieces: as `whole_pieces` cuts the tensor for the ranks of `host`.
            host: None where this rank sums with nobody first.
            servers: what they are asked to do; see :class:`ServerTensor`.

        Raises:
            BytePSError: a server refuses, or has too little memory.
        """
        self.numel = segments[-1][0]
        self.host, self.dtype = host, declarations[0].dtype
        """`dtype`: in which parameters come down, and gradients go up if not in blocks."""
        form = wire.of(self.dtype, declarations[0].wire_dtype)
        self.has_blocks = form.is_block
        self.local = 0 if host is None else host.local
        """This rank's place among the ranks of its host that sum first."""
        self._device = torch.device(declarations[0].device)
        if host is None:
            whole = ((0, self.numel),)
            pieces = [Piece(scatters=(whole,), wanted=None, gather=False)]
        self.shards: list[Shard] = []
        for piece, declaration in zip(pieces, declarations, strict=True):
            (ranges,) = piece.scatters
            own = ranges[self.local]
            cut = cut_segments(segments, own, piece.length)
            tensor = ServerTensor(declaration, rule, cut, **servers)
            whole_piece = ranges[0][0], ranges[-1][1]
            shard = Shard(piece=piece, tensor=tensor, whole=whole_piece, own=own)
            if form.is_block:
                shard.blocks = ShardBlocks(declaration.name, piece.length, form, self._device)
            self.shards.append(shard)

    @property
    def squares(self) -> list[float]:
        """After `push_norm` or `push_try`: squares of what this rank sends and counts, in parts."""
        return [value for shard in self.shards for value in shard.tensor.squares]

    @property
    def zeros(self) -> int:
        """After `push_norm` or `push_try`: how many gradients that this rank sends, and counts, are
        0, if servers count them."""
        return sum(shard.tensor.zeros for shard in self.shards)

    def keep(self) -> None:
        """See ServerTensor."""
        for shard in self.shards:
            shard.tensor.keep()

    def drop(self) -> None:
        """See ServerTensor."""
        for shard in self.shards:
            shard.tensor.drop()

    def give_up(self) -> None:
        """See ServerTensor."""
        for shard in self.shards:
            shard.tensor.give_up()

    def settle(self) -> None:
        """See ServerTensor."""
        for shard in self.shards:
            shard.tensor.settle()

    @property
    def held_slot(self) -> int:
        """See ServerTensor."""
        return self.shards[0].tensor.held_slot

    @property
    def own(self) -> list[Range]:
        """The elements that this rank sends."""
        return [shard.own for shard in self.shards]

    def load(self, slot: int, values: torch.Tensor) -> None:
        """Put this rank's shards of the tensor's fp32 `values`, on the CPU, into a slot."""
        for shard in self.shards:
            begin, end = shard.own
            own = values[begin:end]
            if end - begin < shard.piece.length:
                own = torch.nn.functional.pad(own, (0, shard.piece.length - (end - begin)))
            shard.tensor.load(slot, own)

    def read(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """The fp32 values of a slot, of elements out of one range of `own`, on the CPU.

        Raises:
            ValueError: they are of several shards, or of another rank's.
        """
        for shard in self.shards:
            first, last = shard.own
            if first <= begin <= end <= last:
                return shard.tensor.read(slot, begin - first, end - first)
        raise ValueError(f"elements {begin} to {end} are not of one shard of this rank: {self.own}")

    def gather(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """The fp32 values of a slot, of any elements, on the CPU. All ranks of a host call it with
        the same arguments."""
        if self.host is None:
            return self.read(slot, begin, end)
        flat = torch.empty(end - begin)
        for shard in self.shards:
            (ranges,) = shard.piece.scatters
            # Of each rank's shard the elements that are wanted.
            wanted = [(max(begin - b, 0), min(end, e) - b) for b, e in ranges]
            targets = [b - begin for b, _ in ranges]
            for first, of_each in self._turns(self.host, shard, slot, wanted):
                for target, (low, high), values in zip(targets, wanted, of_each, strict=True):
                    a = max(low, first)
                    z = max(a, min(high, first + len(values)))  # there may be none of it
                    flat[target + a : target + z].copy_(values[a - first : z - first])
        return flat

    def _turns(
        self, host: HostRanks, shard: Shard, slot: int, wanted: Sequence[Range]
    ) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
        """What every rank of the host has of its shard, from the first element to the last that is
        `wanted` of any: the first element of each turn, and the values by rank."""
        held = [cut for cut in wanted if cut[0] < cut[1]]
        if not held:
            return
        first, last = min(cut[0] for cut in held), max(cut[1] for cut in held)
        own = shard.tensor.read(slot, first, last)
        for place in range(0, last - first, _GATHERED_AT_ONCE):
            mine = own[place : place + _GATHERED_AT_ONCE].to(self._device)
            yield first + place, host.of_each(mine)

    def of_host(self, values: Sequence[float]) -> list[list[float]]:
        """What each rank of the host gives, in one order on all of them."""
        if self.host is None:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64, device=self._device)
        return [one.tolist() for one in self.host.of_each(mine)]

    def stream(
        self, tensor: torch.Tensor, *, joins: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """See HostRanks.stream; nothing where this rank sums with nobody first."""
        if self.host is None:
            return contextlib.nullcontext()
        return self.host.stream(tensor, joins=joins)
