"""Parameters that servers update, and of which each rank of a host sends a part.

The ranks of a host sum their gradients first, as :mod:`byteps.torch.nodes` does. Each then sends
its parts together with the ranks of the same local index on the other hosts, servers update these
parts, and an all-gather inside the host gives every rank all parameters. The host's card carries
gradients and parameters once, not once a rank.

A rank that has its host for itself sends one part, the whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import byteps.torch as bps
import torch
from byteps.torch import nodes
from byteps.torch.pieces import Piece, Range
from byteps.torch.server_state import Rule, Segment, ServerTensor, Step

_PACKED_AT_ONCE = 1 << 22
"""Elements: memory of this size is taken while values are made shorter where they lie, and while
what servers keep is put together."""


@dataclass(frozen=True, kw_only=True)
class OnHost:
    """The ranks of this host, which sum first."""

    group: nodes.NodeGroup
    local: int
    """This rank's place among them."""
    average: bool = False
    """Gradients are divided by the number of these ranks before they are added."""
    in_order: bool = False
    """See `nodes.scatter`."""


@dataclass(kw_only=True)
class _Part:
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


@dataclass(frozen=True, kw_only=True)
class Started:
    """What is under way of each part; ended by :meth:`SharedTensor.wait`."""

    handles: list[int]
    landings: list[torch.Tensor]
    """Where this rank's parts come down to; empty where nothing but norms does."""
    target: torch.Tensor | None
    """Where all parameters are gathered; None: in the gradients' memory."""


class SharedTensor:
    """A flat tensor of parameters that servers keep and update, one part by each rank of a host.

    Gradients may have a wider type than they travel in; ranks of a host add them in their own. What
    is started is ended by `wait`; until then its tensors stay as they are. The ranks of a host call
    everything but `squares`, `zeros`, `keep`, `drop`, `give_up` and `load` in the same order.
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
            self._parts.append(_Part(piece=piece, tensor=tensor))
        self._gradients: torch.Tensor | None = None

    @property
    def squares(self) -> list[float]:
        """After `push_norm` or `push_try`: squares of what this rank sends and counts, in parts."""
        return [value for part in self._parts for value in part.tensor.squares]

    @property
    def zeros(self) -> int:
        """After `push_norm` or `push_try`: how many gradients that this rank sends, and counts, are
        0, if servers count them."""
        return sum(part.tensor.zeros for part in self._parts)

    # ------------------------------------------------------------------- gradients go up

    def push_step(
        self, gradients: torch.Tensor, parameters: torch.Tensor | None, step: Step
    ) -> Started:
        """Start; the servers update as soon as they have the sum.

        Args:
            gradients: their memory is used.
            parameters: of the type that travels; None: they come down into `gradients`.
            step: what the update is.
        """

        def push(part: _Part, sent: torch.Tensor, landing: torch.Tensor | None) -> int:
            assert landing is not None
            return part.tensor.push_step(sent, landing, step)

        return self._push(gradients, push, self._landings(parameters), parameters)

    def push_norm(self, gradients: torch.Tensor) -> Started:
        """Start; the servers answer with the sum's squares. The memory of `gradients` is used."""
        return self._push(gradients, lambda part, sent, _: part.tensor.push_norm(sent), None)

    def push_try(self, gradients: torch.Tensor, step: Step) -> Started:
        """Start; the servers answer with the parameters as the step would make them, which come
        into the gradients' memory, and with the sum's squares."""

        def push(part: _Part, sent: torch.Tensor, landing: torch.Tensor | None) -> int:
            assert landing is not None
            return part.tensor.push_try(sent, landing, step)

        return self._push(gradients, push, self._landings(None))

    def _push(
        self,
        gradients: torch.Tensor,
        start: Callable[[_Part, torch.Tensor, torch.Tensor | None], int],
        landing_of: Callable[[_Part], torch.Tensor] | None,
        target: torch.Tensor | None = None,
    ) -> Started:
        self._gradients = gradients
        handles: list[int] = []
        landings: list[torch.Tensor] = []
        # Nothing after this waits for it but `wait`: a backward pass goes on.
        with self._beside(gradients, joins=False):
            if self._host is not None and self._host.average:
                gradients.div_(self._host.group.size)
            # One part is on its way while the host sums the next.
            for part in self._parts:
                part.sent = self._summed(part, gradients)
                if landing_of is not None:
                    landings.append(landing_of(part))
                handles.append(start(part, part.sent, landings[-1] if landings else None))
        return Started(handles=handles, landings=landings, target=target)

    def _summed(self, part: _Part, gradients: torch.Tensor) -> torch.Tensor:
        """What is sent: summed over the host, and in the type in which it travels."""
        if self._host is None:
            values = gradients
        else:
            host = self._host
            values = nodes.scatter(
                gradients, part.piece, host.group, host.local, in_order=host.in_order
            )
        if values.dtype == self._dtype:
            return values
        # Where the parts of all ranks lie side by side once they are gathered.
        place = self.local * part.piece.length
        short = (
            self._short(part, gradients)[place : place + part.piece.length]
            if part.piece.is_in_place
            else values.view(self._dtype)[: values.numel()]
        )
        # Each slice is read before its memory, or that of later ones, is written.
        for source, target in zip(
            values.split(_PACKED_AT_ONCE), short.split(_PACKED_AT_ONCE), strict=True
        ):
            target.copy_(source.to(self._dtype))
        return short

    def _short(self, part: _Part, gradients: torch.Tensor) -> torch.Tensor:
        """Memory for the whole piece, in the type in which it travels: the first part of that of
        the piece's gradients."""
        begin, end = part.whole
        memory = gradients[begin:end].view(self._dtype)
        return memory[: end - begin]

    # ------------------------------------------------------------------- parameters come down

    def step(self, parameters: torch.Tensor | None, step: Step) -> Started:
        """Start; after push_norm or push_try, the servers update. `parameters`: as of push_step."""
        return self._step(self._landings(parameters), step, parameters)

    def forget(self, skipped: Step) -> None:
        """After push_norm: make a step that changes nothing, and wait for it. The gradients' memory
        may hold others by now."""
        started = self._step(lambda part: torch.empty_like(self._sent(part)), skipped, None)
        self._end(started)

    def _step(
        self,
        landing_of: Callable[[_Part], torch.Tensor],
        step: Step,
        target: torch.Tensor | None,
    ) -> Started:
        assert self._gradients is not None
        with self._beside(self._gradients, joins=False):
            landings = [landing_of(part) for part in self._parts]
            handles = [
                part.tensor.step(landing, step)
                for part, landing in zip(self._parts, landings, strict=True)
            ]
        return Started(handles=handles, landings=landings, target=target)

    def _landings(self, parameters: torch.Tensor | None) -> Callable[[_Part], torch.Tensor]:
        """Where this rank's parts come down to: in `parameters`, or where gradients lay."""

        def landing(part: _Part) -> torch.Tensor:
            if parameters is None:
                return self._sent(part)
            if not part.piece.is_in_place:
                return parameters.new_empty(part.piece.length)
            begin, end = part.mine(self.local)
            return parameters[begin:end]

        return landing

    @staticmethod
    def _sent(part: _Part) -> torch.Tensor:
        assert part.sent is not None
        return part.sent

    def wait(self, started: Started) -> None:
        """Until what was started has ended, and every rank of the host has what came down.

        Raises:
            BytePSError: it failed. The ranks of the host that wait for this one end when it does,
                or after BYTEPS_OP_TIMEOUT_S.
            RuntimeError: another rank of the host was lost.
        """
        self._end(started, self._gather_of(started))

    def _gather_of(self, started: Started) -> Callable[[int], None] | None:
        host, gradients = self._host, self._gradients
        if host is None or not started.landings:
            return None

        def gather(index: int) -> None:
            assert gradients is not None
            part, landing = self._parts[index], started.landings[index]
            begin, end = part.whole
            target = started.target
            place = self._short(part, gradients) if target is None else target[begin:end]
            nodes.gather(place, part.piece, landing, host.group)

        return gather

    def end(self, started: Started) -> None:
        """As `wait`, but what came down is used by nobody and not gathered."""
        self._end(started)

    def _end(self, started: Started, then: Callable[[int], None] | None = None) -> None:
        assert self._gradients is not None
        failed: RuntimeError | None = None
        with self._beside(self._gradients):
            for index, handle in enumerate(started.handles):
                try:
                    self._parts[index].tensor.wait(handle)
                    if then is not None and failed is None:
                        then(index)
                except RuntimeError as error:
                    failed = failed or error
        if failed is not None:
            raise failed

    def take(self, parameters: torch.Tensor) -> None:
        """Copy what came down into the gradients' memory to `parameters`, of whatever type."""
        assert self._gradients is not None
        for part in self._parts:
            begin, end = part.whole
            parameters[begin:end].copy_(self._short(part, self._gradients))

    @contextlib.contextmanager
    def _beside(self, tensor: torch.Tensor, *, joins: bool = True) -> Iterator[None]:
        """Where there are collectives inside the host, on the stream of these. `joins`: the
        caller's stream then waits for it."""
        if self._host is None:
            yield
            return
        with torch.no_grad(), nodes.beside_the_caller(tensor):
            yield
        if joins:
            nodes.await_beside(tensor)

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

    def of_host(self, values: Sequence[float]) -> list[list[float]]:
        """What each rank of the host gives, in one order on all of them."""
        if self._host is None:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64, device=self._device)
        gathered = mine.new_empty(self._host.group.size * mine.numel())
        with self._beside(mine):
            self._host.group.all_gather(gathered, mine)
        return gathered.view(self._host.group.size, -1).tolist()

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
            # Of each rank's part the elements that are wanted; all ranks read from the first of any
            # of these to the last.
            wanted = [(max(begin - b, 0), min(end, e) - b) for b, e in ranges]
            held = [cut for cut in wanted if cut[0] < cut[1]]
            if not held:
                continue
            first, last = min(cut[0] for cut in held), max(cut[1] for cut in held)
            own = part.tensor.read(slot, first, last)
            for place in range(first, last, _PACKED_AT_ONCE):
                mine = own[place - first : place - first + _PACKED_AT_ONCE].to(self._device)
                gathered = mine.new_empty(self._host.group.size * mine.numel())
                with self._beside(mine):
                    self._host.group.all_gather(gathered, mine)
                of_each = gathered.chunk(self._host.group.size)
                for (b, _), cut, values in zip(ranges, wanted, of_each, strict=True):
                    low, high = max(cut[0], place), min(cut[1], place + mine.numel())
                    if low < high:
                        target = flat[b + low - begin : b + high - begin]
                        target.copy_(values[low - place : high - place])
        return flat


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
