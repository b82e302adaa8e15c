"""Local steps: replicas train apart, and exchange what they have learned once in many steps.

Each replica steps its own optimizer. Once in `every` steps it takes the difference between the
outer parameters, which are the same on all replicas, and its own (Douillard et al., "DiLoCo",
arXiv 2311.08105). Servers average these differences. The average is the gradient of an outer SGD
with Nesterov's momentum, and the replica goes on from the outer parameters.

A model is cut into fragments, exchanged one after the other (Douillard et al., "Streaming DiLoCo",
arXiv 2501.18512). With `delay` the average is waited for some steps later, so that it travels while
the replica trains. What the replica has learned meanwhile is kept.

    step    0 ........ t ....... t + delay ......... t + every
            |          |         |
            |          |         outer step; parameters = outer + (now - at t)
            |          outer - parameters is pushed
            outer parameters = parameters
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from byteps.torch import ops
from byteps.torch.members import are_alike
from byteps.torch.names import Names
from byteps.torch.operations import Group
from byteps.torch.session import BytePSError

__all__ = ["LocalSteps"]


_PIECE = 1 << 24
"""Values that are worked on at once: a GPU has temporary room for so many, several times."""


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Some of a parameter's values, and their place in a fragment's host memory."""

    parameter: torch.Tensor
    begin: int
    """The first one in the parameter."""
    place: slice

    def values(self) -> torch.Tensor:
        """The replica's own, in place."""
        flat = self.parameter.detach().view(-1)
        return flat[self.begin : self.begin + self.place.stop - self.place.start]

    def of(self, host: torch.Tensor) -> torch.Tensor:
        """This piece of what lies in host memory, in fp32 where the parameter is. On a CPU it is
        that memory, if that is fp32."""
        return host[self.place].to(self.parameter.device, torch.float32)

    def keep(self, values: torch.Tensor, host: torch.Tensor) -> None:
        """Put values where `of` had them from."""
        if host[self.place].data_ptr() != values.data_ptr():
            host[self.place].copy_(values)


@dataclass(kw_only=True)
class _Fragment:
    """Parameters that are exchanged together, end to end. All state is in host memory, which is
    pinned where the parameters are on a GPU. The GPU does the arithmetic, piece by piece."""

    name: str
    pieces: list[_Piece]
    """None where its parameters have no values, as those of a shard that is empty: then nothing is
    exchanged."""
    outer: torch.Tensor
    momentum: torch.Tensor
    starts_at: int
    """The step, counted from the last exchange of another one's beginning, in which it starts."""
    handle: int | None = None
    """Of the average in flight."""
    difference: torch.Tensor | None = None
    """What was pushed, and then the average, in the type in which it travels."""
    sent: torch.Tensor | None = None
    """With a delay, the parameters of which the difference was pushed."""

    def memory(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """For as many values, in host memory."""
        if not self.pieces:
            return torch.empty(0, dtype=dtype)
        pinned = self.pieces[0].parameter.is_cuda
        return torch.empty(self.pieces[-1].place.stop, dtype=dtype, pin_memory=pinned)


def _pieces(parameters: Sequence[torch.Tensor]) -> list[_Piece]:
    pieces, offset = [], 0
    for parameter in parameters:
        for begin in range(0, parameter.numel(), _PIECE):
            count = min(_PIECE, parameter.numel() - begin)
            place = slice(offset, offset + count)
            pieces.append(_Piece(parameter=parameter, begin=begin, place=place))
            offset += count
    return pieces


class LocalSteps:
    """Exchanges the parameters of replicas once in many steps.

    `step`, `exchange` and `load_state_dict` are collective: every member calls them, after the same
    steps.

    Args:
        parameters: those that the inner optimizer steps: fp32 where there are fp32 copies of half
            ones, contiguous, on the CPU or on GPUs. The same on all members when this is made.
        every: steps from one exchange of a parameter to the next.
        lr: of the outer steps. With 1, and no momentum, parameters become the members' mean.
        momentum: of the outer steps (Nesterov's); 0 for none.
        delay: steps from an exchange's beginning to its end; 0: the step waits for it.
        fragments: parts of the model, which are exchanged at different steps, `every / fragments`
            from one to the next.
        wire_dtype: in which differences and their average travel: torch.float32 or torch.bfloat16.
        name: the same on all members, another one for each object of a job.
        group: the ranks that exchange, or their ProcessGroup; None for all workers.
        compare: whether members compare what they begin with. Without it a member can be made
            while the others go on, and is given their `state`.
        in_order: servers add in the order of ranks, so that a run repeated has the same bits.

    Each parameter is sent and received once in `every` steps. It takes 8 bytes of host memory, and
    while it is exchanged 2 more (4 in fp32), and with a delay another 4.

    Raises:
        ValueError: a number is out of its range, or there are no parameters.
        byteps.torch.BytePSError: members disagree about the parameters.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        delay: int = 0,
        fragments: int = 1,
        wire_dtype: torch.dtype = torch.bfloat16,
        name: str = "diloco",
        group: Group = None,
        compare: bool = True,
        in_order: bool = False,
    ) -> None:
        given = list(parameters)
        if not given:
            raise ValueError("there are no parameters to exchange")
        if every < 1 or not 1 <= fragments <= every:
            raise ValueError(
                f"every={every} steps cannot exchange fragments={fragments}: there is one of them "
                "at least, and a step for each"
            )
        if not 0 <= delay < every:
            raise ValueError(f"delay={delay} must be less than every={every}")
        if not lr > 0 or not 0 <= momentum < 1:
            raise ValueError(f"lr={lr} must be positive, momentum={momentum} from 0 to below 1")
        if wire_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"wire_dtype={wire_dtype} must be torch.float32 or torch.bfloat16")
        self._every, self._lr, self._momentum, self._delay = every, lr, momentum, delay
        self._wire = wire_dtype
        self._name, self._group, self._in_order = name, group, in_order
        self.steps = 0
        """That were made since the first exchange could begin."""
        self._fragments = [
            self._fragment(index, part, starts_at=(index + 1) * every // fragments % every)
            for index, part in enumerate(_cut(given, fragments))
        ]
        if compare and not are_alike(given, name, group):
            raise BytePSError(
                f"{name!r}: members have different parameters to begin with: give all of them the "
                "same seed, or the same checkpoint"
            )
        summed = [fragment for fragment in self._fragments if fragment.pieces]
        self._names = Names(*(fragment.name for fragment in summed), group=group, owner=self)
        ops.declare(
            [
                ops.TensorDeclaration(
                    name=fragment.name,
                    dtype=self._wire,
                    numel=fragment.outer.numel(),
                    average=True,
                    group=group,
                    in_order=in_order,
                )
                for fragment in summed
            ]
        )

    @torch.no_grad()
    def _fragment(self, index: int, part: Sequence[torch.Tensor], starts_at: int) -> _Fragment:
        nothing = torch.empty(0)
        fragment = _Fragment(
            name=f"{self._name}/fragment{index}",
            pieces=_pieces(part),
            outer=nothing,
            momentum=nothing,
            starts_at=starts_at,
        )
        fragment.outer, fragment.momentum = fragment.memory(), fragment.memory().zero_()
        for piece in fragment.pieces:
            fragment.outer[piece.place].copy_(piece.values())
        return fragment

    @torch.no_grad()
    def step(self) -> bool:
        """The inner optimizer has made a step, or left one out: begin and end what is due.

        Returns:
            whether parameters were changed.

        Raises:
            byteps.torch.BytePSError: a member or a server was lost.
        """
        self.steps += 1
        changed = False
        for fragment in self._fragments:
            place = (self.steps - fragment.starts_at) % self._every
            if place == 0:
                self._start(fragment)
            if place == self._delay and fragment.handle is not None:
                self._finish(fragment)
                changed = True
        return changed

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange everything, now: all members have the outer parameters afterwards.

        What was in flight is ended before. Done before parameters are saved, or compared.

        Raises:
            byteps.torch.BytePSError: a member or a server was lost.
        """
        for fragment in self._fragments:
            if fragment.handle is not None:
                self._finish(fragment)
            self._start(fragment)
        self.end()

    @torch.no_grad()
    def end(self) -> None:
        """End the exchanges in flight, before this member leaves the others.

        Raises:
            byteps.torch.BytePSError: a member or a server was lost.
        """
        for fragment in self._fragments:
            if fragment.handle is not None:
                self._finish(fragment)

    def state(self) -> list[torch.Tensor]:
        """The outer parameters and momentum of each fragment, in host memory: not copies."""
        return [tensor for one in self._fragments for tensor in (one.outer, one.momentum)]

    def _start(self, fragment: _Fragment) -> None:
        if not fragment.pieces:
            return
        fragment.difference = fragment.memory(self._wire)
        fragment.sent = fragment.memory() if self._delay else None
        for piece in fragment.pieces:
            now = piece.values()
            fragment.difference[piece.place].copy_(piece.of(fragment.outer) - now)
            if fragment.sent is not None:
                fragment.sent[piece.place].copy_(now)
        fragment.handle = ops.push_pull_async_inplace(
            fragment.difference,
            average=True,
            name=fragment.name,
            group=self._group,
            in_order=self._in_order,
        )

    def _finish(self, fragment: _Fragment) -> None:
        assert fragment.handle is not None
        assert fragment.difference is not None
        handle, fragment.handle = fragment.handle, None
        ops.synchronize(handle)
        for piece in fragment.pieces:
            gradient, outer = piece.of(fragment.difference), piece.of(fragment.outer)
            # One operation after the other, so that all members round alike, whatever their
            # processors fuse.
            if self._momentum:
                momentum = piece.of(fragment.momentum)
                momentum.mul_(self._momentum).add_(gradient)
                gradient.add_(momentum * self._momentum)
                piece.keep(momentum, fragment.momentum)
            outer.sub_(gradient.mul_(self._lr))
            piece.keep(outer, fragment.outer)
            now = piece.values()
            if fragment.sent is not None:
                now.copy_(now.float().sub_(piece.of(fragment.sent)).add_(outer))
            else:
                now.copy_(outer)
        fragment.sent = fragment.difference = None

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The outer state, of tensors in host memory.

        Only after `exchange`, which leaves nothing in flight.

        Raises:
            RuntimeError: an exchange is in flight.
        """
        if any(fragment.handle is not None for fragment in self._fragments):
            raise RuntimeError("an exchange is in flight: call exchange() before state_dict()")
        return {
            "steps": self.steps,
            "outer": [fragment.outer.clone() for fragment in self._fragments],
            "momentum": [fragment.momentum.clone() for fragment in self._fragments],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved outer state; parameters become the outer ones.

        Raises:
            ValueError: it is of other parameters or another number of fragments.
        """
        sizes = [len(outer) for outer in state["outer"]]
        mine = [fragment.outer.numel() for fragment in self._fragments]
        if sizes != mine:
            raise ValueError(f"the outer state is of fragments of {sizes} values, not {mine}")
        self.steps = state["steps"]
        saved = zip(self._fragments, state["outer"], state["momentum"], strict=True)
        for fragment, outer, momentum in saved:
            fragment.outer.copy_(outer)
            fragment.momentum.copy_(momentum)
            for piece in fragment.pieces:
                piece.values().copy_(outer[piece.place])


def _cut(parameters: Sequence[torch.Tensor], fragments: int) -> list[list[torch.Tensor]]:
    """Into so many parts of about one length, in their order; fewer where there are fewer."""
    total = sum(parameter.numel() for parameter in parameters)
    parts: list[list[torch.Tensor]] = [[]]
    before = 0
    for parameter in parameters:
        if parts[-1] and before * fragments >= len(parts) * total:
            parts.append([])
        parts[-1].append(parameter)
        before += parameter.numel()
    return parts
