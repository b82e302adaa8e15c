"""Pushes gradients to the servers and pulls parameters, shard by shard.

The ranks of a host sum their gradients first, as in :mod:`byteps.torch.nodes`. Each rank then
pushes its shards in a group with the ranks of the same local index on other hosts. Servers update
these shards, and an all-gather inside the host gives every rank all parameters. So the host's NIC
carries gradients and parameters once, not once per rank. A rank alone on its host pushes one shard,
the whole tensor.

For gradients in blocks of few bits, servers answer with blocks of differences. Each rank adds these
to its parameters when it waits for them.
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
from byteps.torch.spans import Span, Wait
from byteps.torch.wire import WireType, feedback

DIFFERENCES = wire.int8()
"""Type of the servers' answers to gradients in blocks of any type. Four bits are too few for the
steps of Adam, which all have about the same size."""


class ShardBlocks:
    """Memory for blocks of gradients and of differences. Both share it if they have the same
    length.

    Attributes:
        arriving: memory for the pulled differences.
    """

    def __init__(self, name: str, length: int, form: WireType, device: torch.device) -> None:
        """`name`: name of the shard on the servers. `length`: its number of values."""
        self._name, self._length, self._form = name, length, form
        self._sent = form.empty(length, device)
        self.arriving = (
            self._sent
            if form.element_bytes == DIFFERENCES.element_bytes
            else DIFFERENCES.empty(length, device)
        )

    def encoded(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the encoded gradients. With feedback, earlier losses are added first."""
        lost = None
        if self._form.feedback:
            lost, _ = feedback.of(self._name, self._length, gradients.device)
        wire.encode(gradients, self._form, self._sent, lost, next_seed(self._name))
        return self._sent

    def add_to(self, held: torch.Tensor, out: torch.Tensor) -> None:
        """Set `out` to the shard's parameters: `held` plus the pulled differences."""
        wire.add_differences(self.arriving, held, out[: held.numel()])


_GATHERED_AT_ONCE = 1 << 22
"""Number of elements per all-gather of the servers' values. It limits the temporary memory of each
rank of a host."""


@dataclass(kw_only=True)
class Shard:
    """Elements of a piece that this rank sends."""

    piece: Piece
    tensor: ServerTensor
    whole: Range
    """Range of the piece in the flat tensor."""
    own: Range
    """Range of the flat tensor that this rank sends; zeros may follow as padding."""
    blocks: ShardBlocks | None = None
    """Set if gradients travel in blocks of few bits."""
    sent: torch.Tensor | None = None
    """Gradients as they travel. Pulled parameters may overwrite them."""


class ServerShards:
    """Flat tensor of parameters on the servers. The ranks of a host call `of_host` and `gather` in
    the same order."""

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
        """Declare the shards to the servers.

        Args:
            declarations: declarations of the tensors that this rank sends: one per element of
                `pieces`, or one for the whole tensor. Their dtype is that of pulled parameters. If
                their wire dtype is a type of blocks, gradients are pushed in such blocks, and
                differences are pulled instead of parameters.
            rule: the update rule.
            segments: parameter group of each element; they cover the tensor.
            pieces: pieces into which `whole_pieces` cuts the tensor for the ranks of `host`.
            host: the ranks of this host that sum first; None: this rank sends the whole tensor.
            servers: options of :class:`ServerTensor`.

        Raises:
            BytePSError: a server refuses, or has too little memory.
        """
        self.numel = segments[-1][0]
        self.host, self.dtype = host, declarations[0].dtype
        """`dtype`: type in which parameters are pulled. Gradients are pushed in it, too, unless
        they travel in blocks."""
        form = wire.of(self.dtype, declarations[0].wire_dtype)
        self.has_blocks = form.is_block
        self.local = 0 if host is None else host.local
        """Index of this rank among the ranks of its host that sum first."""
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
        """Release the servers' state; see :meth:`ServerTensor.close`."""
        for shard in self.shards:
            shard.tensor.close()

    @property
    def squares(self) -> list[float]:
        """Sums of squares of the gradients that this rank sends and that count in the norm, in
        parts. Valid after `push_norm` or `push_try`."""
        return [value for shard in self.shards for value in shard.tensor.squares]

    @property
    def zeros(self) -> int:
        """Number of zeros among the gradients that this rank sends and that count, if servers count
        them. Valid after `push_norm` or `push_try`."""
        return sum(shard.tensor.zeros for shard in self.shards)

    def keep(self) -> None:
        for shard in self.shards:
            shard.tensor.keep()

    def drop(self) -> None:
        for shard in self.shards:
            shard.tensor.drop()

    def give_up(self) -> None:
        for shard in self.shards:
            shard.tensor.give_up()

    def settle(self) -> None:
        for shard in self.shards:
            shard.tensor.settle()

    @property
    def held_slot(self) -> int:
        return self.shards[0].tensor.held_slot

    @property
    def own(self) -> list[Range]:
        """Ranges that this rank sends."""
        return [shard.own for shard in self.shards]

    def load(self, slot: int, values: torch.Tensor) -> None:
        """Load this rank's shards of the tensor's fp32 `values`, on the CPU, into a slot."""
        for shard in self.shards:
            begin, end = shard.own
            own = values[begin:end]
            if end - begin < shard.piece.length:
                own = torch.nn.functional.pad(own, (0, shard.piece.length - (end - begin)))
            shard.tensor.load(slot, own)

    def read(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """Return fp32 values of a slot, on the CPU, for elements within one range of `own`.

        Raises:
            ValueError: the elements belong to several shards, or to a shard of another rank.
        """
        for shard in self.shards:
            first, last = shard.own
            if first <= begin <= end <= last:
                return shard.tensor.read(slot, begin - first, end - first)
        raise ValueError(f"elements {begin} to {end} are not of one shard of this rank: {self.own}")

    def gather(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """Return fp32 values of a slot for any elements, on the CPU. All ranks of a host call this
        with the same arguments."""
        if self.host is None:
            return self.read(slot, begin, end)
        flat = torch.empty(end - begin)
        for shard in self.shards:
            (ranges,) = shard.piece.scatters
            # `wanted`: range of each rank's shard that is in the result.
            wanted = [(max(begin - b, 0), min(end, e) - b) for b, e in ranges]
            targets = [b - begin for b, _ in ranges]
            for first, of_each in self._turns(self.host, shard, slot, wanted):
                for target, (low, high), values in zip(targets, wanted, of_each, strict=True):
                    a = max(low, first)
                    # The range is empty if this turn has no wanted elements.
                    z = max(a, min(high, first + len(values)))
                    flat[target + a : target + z].copy_(values[a - first : z - first])
        return flat

    def _turns(
        self, host: HostRanks, shard: Shard, slot: int, wanted: Sequence[Range]
    ) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
        """Yield (index of the first element, values by rank) for each turn. The turns cover the
        elements that are `wanted` from any rank of the host."""
        held = [cut for cut in wanted if cut[0] < cut[1]]
        if not held:
            return
        first, last = min(cut[0] for cut in held), max(cut[1] for cut in held)
        own = shard.tensor.read(slot, first, last)
        for at in range(0, last - first, _GATHERED_AT_ONCE):
            own_part = own[at : at + _GATHERED_AT_ONCE].to(self._device)
            yield first + at, host.of_each(own_part)

    def of_host(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of each rank of the host, in the same order on all ranks."""
        if self.host is None:
            return [list(values)]
        own_values = torch.tensor(values, dtype=torch.float64, device=self._device)
        return [of_rank.tolist() for of_rank in self.host.of_each(own_values)]

    def stream(
        self, tensor: torch.Tensor, *, joins: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context of HostRanks.stream. Return a null context if the ranks of this host
        do not sum first."""
        if self.host is None:
            return contextlib.nullcontext()
        return self.host.stream(tensor, joins=joins)


_PACKED_AT_ONCE = 1 << 22
"""Number of elements that are converted to a shorter type at a time. It limits the temporary memory
of the conversion."""

Start = Callable[[ServerTensor, torch.Tensor, torch.Tensor], int]
"""Function that starts an operation on a shard and returns its handle. Its arguments: the shard,
the tensor to send, and the tensor to receive parameters (the same tensor if none are pulled)."""
Restart = Callable[[ServerTensor, torch.Tensor], int]
"""Function that starts an operation on a shard whose gradients were pushed, and returns its handle.
Its arguments: the shard, and the tensor to receive parameters."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """Operations in flight, one per shard. :meth:`ShardTransfer.wait` ends them."""

    handles: list[int]
    landings: list[torch.Tensor]
    """Tensors that receive this rank's shards of the parameters. Empty if only norms are pulled."""
    target: torch.Tensor | None
    """Tensor in which all parameters are gathered; None: the gradients' memory."""


class ShardTransfer:
    """Pushes gradients and pulls parameters of one :class:`ServerShards`.

    Gradients may have a wider type than the one in which they travel; ranks of a host add them in
    their own type. Call `wait` for each started operation, and do not change its tensors before.
    The ranks of a host make the same calls in the same order.
    """

    def __init__(self, shards: ServerShards, parameters: torch.Tensor) -> None:
        """`parameters`: this rank's parameters, flat."""
        self._shards, self._parameters = shards, parameters
        self._name = shards.shards[0].tensor.name
        self._gradients: torch.Tensor | None = None
        """Gradients that were pushed last."""

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
            gradients: flat; their memory is overwritten.
            start: called for each shard.
            lands: whether parameters are pulled.
            target: flat tensor for the parameters, in the type in which they are pulled; None: the
                memory of `gradients`.
        """
        with Span("byteps.push " + self._name):
            return self._push(gradients, start, lands, target)

    def _push(
        self, gradients: torch.Tensor, start: Start, lands: bool, target: torch.Tensor | None
    ) -> Started:
        self._gradients = gradients
        host = self._shards.host
        handles: list[int] = []
        landings: list[torch.Tensor] = []
        # The caller's stream does not wait here, so the backward pass goes on. `wait` makes it
        # wait.
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
        """Start an operation that pulls parameters on each shard whose gradients were pushed.

        Args:
            start: called for each shard.
            target: see `push`.
        """
        with Span("byteps.update " + self._name):
            return self._update(start, target, lambda shard: self._landing(shard, target))

    def discard(self, start: Restart) -> None:
        """Do the same as `update`, then wait, and discard the parameters. The gradients' memory is
        not touched."""
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
        """Return the tensor that receives this rank's shard: a view of `target` or, without a
        target, of the gradients' memory."""
        if target is None and shard.blocks is None:
            return _sent(shard)
        if target is None:
            assert self._gradients is not None
            short = self._short(shard, self._gradients)
            landing = self._in_place(shard, short)
            return short.new_empty(shard.piece.length) if landing is None else landing
        if not shard.piece.is_in_place:
            return target.new_empty(shard.piece.length)
        begin, end = shard.own
        return target[begin:end]

    def _sent_of(self, shard: Shard, gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradients to send: summed over the host, in the type in which they travel."""
        host, dtype = self._shards.host, self._shards.dtype
        values = gradients if host is None else host.scatter(gradients, shard.piece)
        if shard.blocks is not None:
            return shard.blocks.encoded(values)
        if values.dtype == dtype:
            return values
        short = self._in_place(shard, self._short(shard, gradients))
        if short is None:
            short = values.view(dtype)[: values.numel()]
        # Each slice is read before its memory or that of later slices is written.
        for source, target in zip(
            values.split(_PACKED_AT_ONCE), short.split(_PACKED_AT_ONCE), strict=True
        ):
            target.copy_(source.to(dtype))
        return short

    def _in_place(self, shard: Shard, whole: torch.Tensor) -> torch.Tensor | None:
        """Return a view of this rank's shard of a whole piece; None if the shards are not laid end
        to end."""
        if not shard.piece.is_in_place:
            return None
        at = self._shards.local * shard.piece.length
        return whole[at : at + shard.piece.length]

    def _short(self, shard: Shard, gradients: torch.Tensor) -> torch.Tensor:
        """Return memory for the whole piece in the type in which parameters are pulled. It is the
        first part of the memory of the piece's gradients."""
        begin, end = shard.whole
        memory = gradients[begin:end].view(self._shards.dtype)
        return memory[: end - begin]

    def wait(self, started: Started) -> None:
        """Wait until the operations have ended and every rank of the host has the parameters.

        Raises:
            BytePSError: an operation failed. Ranks of the host that wait for this rank end when it
                ends, or after BYTEPS_OP_TIMEOUT_S.
            RuntimeError: another rank of the host was lost.
        """
        what = "parameters" if started.landings else "norm"
        with Wait(f"byteps.wait {what} {self._name}", self._parameters.device):
            self._end(started, gathers=bool(started.landings))

    def end(self, started: Started) -> None:
        """Do the same as `wait`, but do not gather the parameters."""
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
        destination = self._short(shard, self._gradients) if target is None else target[begin:end]
        host.gather(destination, shard.piece, started.landings[index])

    def take(self, parameters: torch.Tensor) -> None:
        """Copy parameters from the gradients' memory to `parameters`, which may have any type."""
        assert self._gradients is not None
        for shard in self._shards.shards:
            begin, end = shard.whole
            parameters[begin:end].copy_(self._short(shard, self._gradients))


def _arriving(shard: Shard, landing: torch.Tensor) -> torch.Tensor:
    """Return the tensor that receives a shard. The shard's destination is `landing`."""
    return landing if shard.blocks is None else shard.blocks.arriving


def _spare(shard: Shard) -> torch.Tensor:
    """Return memory for a shard that will be discarded."""
    return torch.empty_like(_sent(shard)) if shard.blocks is None else shard.blocks.arriving


def _sent(shard: Shard) -> torch.Tensor:
    assert shard.sent is not None
    return shard.sent
