"""Gradients go up to the servers, parameters come down, shard by shard.

The ranks of a host sum their gradients first, as :mod:`byteps.torch.nodes` does. Each then sends
its shards together with the ranks of the same local index on the other hosts, servers update these
shards, and an all-gather inside the host gives every rank all parameters. The host's NIC carries
gradients and parameters once, not once per rank. A rank that has its host for itself sends one
shard, the whole.

Gradients that travel in blocks of few bits are answered with blocks too: with what each rank adds
to the parameters that it holds, once it waits for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from byteps.torch import wire
from byteps.torch.engine import TensorDeclaration
from byteps.torch.in_flight import next_seed
from byteps.torch.node_groups import Piece, Range
from byteps.torch.nodes import HostRanks
from byteps.torch.server_tensor import Rule, Segment, ServerTensor, cut_segments
from byteps.torch.wire import WireType, feedback

DIFFERENCES = wire.int8()
"""In which servers answer, whatever gradients travel in. Four bits are too few for the steps of
Adam, which are all of about one size."""


class ShardBlocks:
    """Memory for blocks of gradients and of differences; the same where they are as long.

    Attributes:
        arriving: where what is to be added to the parameters comes down to.
    """

    def __init__(self, name: str, length: int, form: WireType, device: torch.device) -> None:
        """`name`: under which servers know the shard, of `length` values."""
        self._name, self._length, self._form = name, length, form
        self._sent = form.empty(length, device)
        self.arriving = (
            self._sent
            if form.element_bytes == DIFFERENCES.element_bytes
            else DIFFERENCES.empty(length, device)
        )

    def encoded(self, gradients: torch.Tensor) -> torch.Tensor:
        """What is sent; with feedback it has what was lost before."""
        lost = None
        if self._form.feedback:
            lost, _ = feedback.of(self._name, self._length, gradients.device)
        wire.encode(gradients, self._form, self._sent, lost, next_seed(self._name))
        return self._sent

    def add_to(self, held: torch.Tensor, out: torch.Tensor) -> None:
        """`out` gets the parameters of the shard: those that are `held`, and what came down."""
        wire.add_differences(self.arriving, held, out[: held.numel()])


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

    def close(self) -> None:
        """Give the servers' state back; see :meth:`ServerTensor.close`."""
        for shard in self.shards:
            shard.tensor.close()

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


_PACKED_AT_ONCE = 1 << 22
"""Elements: memory of this size is taken while values are made shorter where they lie."""

Start = Callable[[ServerTensor, torch.Tensor, torch.Tensor], int]
"""Starts an operation on a shard and returns its handle: with what is sent, and where parameters
come down to (the memory of what is sent, where none do)."""
Restart = Callable[[ServerTensor, torch.Tensor], int]
"""Starts an operation on a shard whose gradients were pushed, and returns its handle: with where
its parameters come down to."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """What is in flight of each shard; ended by :meth:`ShardTransfer.wait`."""

    handles: list[int]
    landings: list[torch.Tensor]
    """Where this rank's shards of the parameters are put; empty where nothing but norms comes
    down."""
    target: torch.Tensor | None
    """Where all parameters are gathered; None: in the gradients' memory."""


class ShardTransfer:
    """Moves what belongs to one :class:`ServerShards`.

    Gradients may have a wider type than they travel in; ranks of a host add them in their own. What
    is started is ended by `wait`; until then its tensors stay as they are. The ranks of a host make
    the same calls in the same order.
    """

    def __init__(self, shards: ServerShards, parameters: torch.Tensor) -> None:
        """`parameters`: what this rank holds, flat."""
        self._shards, self._parameters = shards, parameters
        self._gradients: torch.Tensor | None = None
        """That were pushed last."""

    def push(
        self,
        gradients: torch.Tensor,
        start: Start,
        *,
        lands: bool = True,
        target: torch.Tensor | None = None,
    ) -> Started:
        """Sum `gradients` over the host, and start an operation on each shard of the sum.

        Args:
            gradients: flat; their memory is used.
            start: called for each shard.
            lands: whether parameters come down.
            target: where to, flat, of the type in which they come; None: into the memory of
                `gradients`.
        """
        self._gradients = gradients
        host = self._shards.host
        handles: list[int] = []
        landings: list[torch.Tensor] = []
        # Nothing after this waits for it but `wait`: a backward pass goes on.
        with self._shards.stream(gradients, joins=False):
            if host is not None and host.average:
                gradients.div_(host.group.size)
            # One shard is in flight while the host sums the next.
            for shard in self._shards.shards:
                shard.sent = self._sent_of(shard, gradients)
                landing = self._landing(shard, target)
                if lands:
                    landings.append(landing)
                handles.append(start(shard.tensor, shard.sent, _arriving(shard, landing)))
        return Started(handles=handles, landings=landings, target=target)

    def update(self, start: Restart, target: torch.Tensor | None) -> Started:
        """Start an operation on each shard whose gradients were pushed; parameters come down.

        Args:
            start: called for each shard.
            target: as of `push`.
        """
        return self._update(start, target, lambda shard: self._landing(shard, target))

    def discard(self, start: Restart) -> None:
        """As `update`, and wait; but nobody wants the parameters, and the gradients' memory may
        hold others by now."""
        self.end(self._update(start, None, _spare))

    def _update(
        self,
        start: Restart,
        target: torch.Tensor | None,
        landing_of: Callable[[Shard], torch.Tensor],
    ) -> Started:
        assert self._gradients is not None
        with self._shards.stream(self._gradients, joins=False):
            landings = [landing_of(shard) for shard in self._shards.shards]
            handles = [
                start(shard.tensor, _arriving(shard, landing))
                for shard, landing in zip(self._shards.shards, landings, strict=True)
            ]
        return Started(handles=handles, landings=landings, target=target)

    def _landing(self, shard: Shard, target: torch.Tensor | None) -> torch.Tensor:
        """Where this rank's shard comes down to: in `target`, or where its gradients lay."""
        if target is None and shard.blocks is None:
            return _sent(shard)
        if target is None:
            assert self._gradients is not None
            short = self._short(shard, self._gradients)
            place = self._place(shard, short)
            return short.new_empty(shard.piece.length) if place is None else place
        if not shard.piece.is_in_place:
            return target.new_empty(shard.piece.length)
        begin, end = shard.own
        return target[begin:end]

    def _sent_of(self, shard: Shard, gradients: torch.Tensor) -> torch.Tensor:
        """What is sent: summed over the host, and as it travels."""
        host, dtype = self._shards.host, self._shards.dtype
        values = gradients if host is None else host.scatter(gradients, shard.piece)
        if shard.blocks is not None:
            return shard.blocks.encoded(values)
        if values.dtype == dtype:
            return values
        short = self._place(shard, self._short(shard, gradients))
        if short is None:
            short = values.view(dtype)[: values.numel()]
        # Each slice is read before its memory, or that of later ones, is written.
        for source, target in zip(
            values.split(_PACKED_AT_ONCE), short.split(_PACKED_AT_ONCE), strict=True
        ):
            target.copy_(source.to(dtype))
        return short

    def _place(self, shard: Shard, whole: torch.Tensor) -> torch.Tensor | None:
        """Where this rank's shard lies in a whole piece, once those of all ranks lie side by side;
        None where they do not."""
        if not shard.piece.is_in_place:
            return None
        place = self._shards.local * shard.piece.length
        return whole[place : place + shard.piece.length]

    def _short(self, shard: Shard, gradients: torch.Tensor) -> torch.Tensor:
        """Memory for the whole piece, in the type in which parameters come: the first part of that
        of the piece's gradients."""
        begin, end = shard.whole
        memory = gradients[begin:end].view(self._shards.dtype)
        return memory[: end - begin]

    def wait(self, started: Started) -> None:
        """Until what was started has ended, and every rank of the host has what came down.

        Raises:
            BytePSError: it failed. The ranks of the host that wait for this one end when it does,
                or after BYTEPS_OP_TIMEOUT_S.
            RuntimeError: another rank of the host was lost.
        """
        self._end(started, gathers=bool(started.landings))

    def end(self, started: Started) -> None:
        """As `wait`, but what came down is used by nobody and not gathered."""
        self._end(started, gathers=False)

    def _end(self, started: Started, *, gathers: bool) -> None:
        assert self._gradients is not None
        failed: RuntimeError | None = None
        with self._shards.stream(self._gradients):
            for index, handle in enumerate(started.handles):
                try:
                    self._shards.shards[index].tensor.wait(handle)
                    if gathers and failed is None:
                        self._add_differences(started, index)
                        self._gather(started, index)
                except RuntimeError as error:
                    failed = failed or error
        if failed is not None:
            raise failed

    def _add_differences(self, started: Started, index: int) -> None:
        shard = self._shards.shards[index]
        if shard.blocks is not None:
            begin, end = shard.own
            shard.blocks.add_to(self._parameters[begin:end], started.landings[index])

    def _gather(self, started: Started, index: int) -> None:
        host, shard = self._shards.host, self._shards.shards[index]
        if host is None:
            return
        assert self._gradients is not None
        begin, end = shard.whole
        target = started.target
        place = self._short(shard, self._gradients) if target is None else target[begin:end]
        host.gather(place, shard.piece, started.landings[index])

    def take(self, parameters: torch.Tensor) -> None:
        """Copy what came down into the gradients' memory to `parameters`, of whatever type."""
        assert self._gradients is not None
        for shard in self._shards.shards:
            begin, end = shard.whole
            parameters[begin:end].copy_(self._short(shard, self._gradients))


def _arriving(shard: Shard, landing: torch.Tensor) -> torch.Tensor:
    """Where a shard comes down to that is put into `landing`."""
    return landing if shard.blocks is None else shard.blocks.arriving


def _spare(shard: Shard) -> torch.Tensor:
    """Where a shard comes down to that nobody wants."""
    return torch.empty_like(_sent(shard)) if shard.blocks is None else shard.blocks.arriving


def _sent(shard: Shard) -> torch.Tensor:
    assert shard.sent is not None
    return shard.sent
