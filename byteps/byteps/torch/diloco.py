"""Local steps: replicas train on their own and synchronize once in many steps (DiLoCo).

Each replica steps its own optimizer. The outer parameters are the same on all replicas. Once in
`every` steps each replica sends the difference between the outer parameters and its own parameters,
and servers average these differences (Douillard et al., "DiLoCo", arXiv 2311.08105). The average is
the gradient of an outer SGD with Nesterov's momentum. The replica goes on from the new outer
parameters.

In the first `after` steps members sum their gradients, so that their parameters are the same. Each
exchange then only fills the momentum with the change of the parameters. Differences travel in bf16,
or in blocks of few bits; then what rounding loses is added to the next difference, here and on the
servers. A single member makes outer steps too, and sends nothing.

A model is cut into fragments, which are exchanged one after the other (Douillard et al., "Streaming
DiLoCo", arXiv 2501.18512). With `delay` the replica waits for the average only that many steps
later, so that the transfer overlaps training. The updates that are made meanwhile are kept.

    step    0 ........ t ....... t + delay ......... t + every
            |          |         |
            |          |         outer step; parameters = outer + (now - at t)
            |          outer - parameters is pushed
            outer parameters = parameters
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from byteps.torch import ops, session, wire
from byteps.torch.members import are_alike
from byteps.torch.names import Names
from byteps.torch.operations import Group, ranks_of
from byteps.torch.session import BytePSError

__all__ = ["LocalSteps", "outer_rate"]


WIRES = {
    "float32": wire.of(torch.float32),
    "bfloat16": wire.of(torch.bfloat16),
    "int8": wire.int8(feedback=True),
    "int4": wire.int4(feedback=True),
}
"""Types in which differences travel."""

_PIECE = 1 << 24
"""Number of values per operation. It limits temporary GPU memory to a few tensors of this size."""


def outer_rate(members: int) -> float:
    """Return the learning rate of outer steps that was the best for this number of members
    (Charles et al., arXiv 2503.09799, with momentum 0.9)."""
    if members == 1:
        return 0.4
    return 0.6 if members <= 4 else 0.8


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Range of a parameter's values, and its place in a fragment's host memory."""

    parameter: torch.Tensor
    begin: int
    """Index of the range's first value in the flattened parameter."""
    span: slice

    def values(self) -> torch.Tensor:
        """Return the replica's own values, in place."""
        flat = self.parameter.detach().view(-1)
        return flat[self.begin : self.begin + self.span.stop - self.span.start]

    def of(self, host: torch.Tensor) -> torch.Tensor:
        """Return this piece of `host`, which is in host memory, as fp32 on the parameter's device.
        On the CPU the result is a view of `host`, if `host` is fp32."""
        return host[self.span].to(self.parameter.device, torch.float32)

    def keep(self, values: torch.Tensor, host: torch.Tensor) -> None:
        """Store values in `host`, at the place that `of` reads."""
        if host[self.span].data_ptr() != values.data_ptr():
            host[self.span].copy_(values)


@dataclass(kw_only=True)
class _Fragment:
    """Parameters that are exchanged together, laid end to end. All state is in host memory, pinned
    if the parameters are on a GPU. The GPU does the arithmetic, piece by piece."""

    name: str
    pieces: list[_Piece]
    """Pieces of the parameters. If the parameters have no values, as in an empty shard, there are
    no pieces, and nothing is exchanged."""
    outer: torch.Tensor
    momentum: torch.Tensor
    starts_at: int
    """Step of a period (0 to `every` - 1) in which the fragment's exchange starts."""
    started: int
    """Number of steps at the start of the last exchange."""
    handle: int | None = None
    """Handle of the average in flight, if there are other members."""
    difference: torch.Tensor | None = None
    """The pushed difference, later the average. None: no exchange is in flight."""
    sent: torch.Tensor | None = None
    """With a delay, the parameters from which the difference was taken."""

    def memory(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate host memory for as many values as the fragment has."""
        if not self.pieces:
            return torch.empty(0, dtype=dtype)
        pinned = self.pieces[0].parameter.is_cuda
        return torch.empty(self.pieces[-1].span.stop, dtype=dtype, pin_memory=pinned)


def _pieces(parameters: Sequence[torch.Tensor]) -> list[_Piece]:
    pieces, offset = [], 0
    for parameter in parameters:
        for begin in range(0, parameter.numel(), _PIECE):
            count = min(_PIECE, parameter.numel() - begin)
            span = slice(offset, offset + count)
            pieces.append(_Piece(parameter=parameter, begin=begin, span=span))
            offset += count
    return pieces


class LocalSteps:
    """Exchanges the parameters of replicas once in many steps.

    `step`, `exchange` and `load_state_dict` are collective: every member calls them, after the same
    steps.

    Args:
        parameters: the parameters that the inner optimizer steps: its fp32 copies, if it keeps such
            copies of bf16 or fp16 parameters. They are contiguous, on the CPU or on GPUs, and the
            same on all members at construction.
        every: steps from one exchange of a parameter to the next.
        lr: learning rate of outer steps; None: `outer_rate`. With 1 and no momentum, parameters
            become the mean.
        momentum: Nesterov momentum of outer steps; 0 for none.
        after: number of initial steps in which members sum their gradients. Exchanges fill the
            momentum, and change no parameter.
        delay: steps from the beginning of an exchange to its end; 0: the step that begins an
            exchange waits for its end.
        fragments: number of parts of the model. Their exchanges start `every / fragments` steps
            apart.
        wire_dtype: type in which differences and averages travel: torch.float32, torch.bfloat16,
            "int8" or "int4".
        name: the same on all members, different for each object of a job.
        group: the ranks that exchange, or their ProcessGroup; None for all workers.
        compare: whether members compare their initial parameters. Without it, a member may be
            created while the others train; the caller then copies their `state` to it.
        done: number of steps that members have made before.
        in_order: whether servers add in the order of ranks. Repeated runs then have the same bits.

    Each parameter value is sent and received once in `every` steps. A value takes 8 bytes of host
    memory (10 with int8 and int4), 4 more while it is exchanged (2 in bf16, 5 in int8 and int4),
    and another 4 with a delay.

    Raises:
        ValueError: an argument is out of range, or there are no parameters.
        byteps.torch.BytePSError: members disagree about the parameters.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        *,
        every: int,
        lr: float | None = None,
        momentum: float = 0.9,
        after: int = 0,
        delay: int = 0,
        fragments: int = 1,
        wire_dtype: torch.dtype | str = torch.bfloat16,
        name: str = "diloco",
        group: Group = None,
        compare: bool = True,
        done: int = 0,
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
        members = len(ranks_of(group)) or session.size()
        rate = outer_rate(members) if lr is None else lr
        if not rate > 0 or not 0 <= momentum < 1:
            raise ValueError(f"lr={lr} must be positive, momentum={momentum} from 0 to below 1")
        form = WIRES.get(str(wire_dtype).removeprefix("torch."))
        if form is None:
            raise ValueError(f"wire_dtype={wire_dtype} must be one of {', '.join(WIRES)}")
        self._every, self._lr, self._momentum, self._delay = every, rate, momentum, delay
        self._after, self._is_alone = after, members == 1
        self._wire = WIRES["float32"] if self._is_alone else form
        self._memory = torch.bfloat16 if self._wire is WIRES["bfloat16"] else torch.float32
        self._name, self._group, self._in_order = name, group, in_order
        self.steps = done
        """Number of steps that members have made."""
        self._fragments = [
            self._fragment(index, part, starts_at=(index + 1) * every // fragments % every)
            for index, part in enumerate(_cut(given, fragments))
        ]
        if self._is_alone:
            return
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
                    dtype=self._memory,
                    numel=fragment.outer.numel(),
                    average=True,
                    group=group,
                    wire_dtype=self._wire,
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
            started=self.steps,
        )
        fragment.outer, fragment.momentum = fragment.memory(), fragment.memory().zero_()
        for piece in fragment.pieces:
            fragment.outer[piece.span].copy_(piece.values())
        return fragment

    @torch.no_grad()
    def step(self) -> bool:
        """Start and finish the exchanges that are due. Call it after each step of the inner
        optimizer, even after a skipped one.

        Returns:
            whether parameters were changed.

        Raises:
            byteps.torch.BytePSError: a member or a server was lost.
        """
        self.steps += 1
        changed = False
        for fragment in self._fragments:
            phase = (self.steps - fragment.starts_at) % self._every
            if phase == 0 and self.steps <= self._after:
                self._fill(fragment)
            elif phase == 0:
                self._start(fragment)
            if phase == self._delay and fragment.difference is not None:
                self._finish(fragment)
                changed = True
        return changed

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange now all fragments with steps since their last exchange. All members have the
        same parameters afterwards: the outer ones, or in the first `after` steps their own.

        First finishes the exchanges in flight. Call it before parameters are saved or compared.

        Raises:
            byteps.torch.BytePSError: a member or a server was lost.
        """
        self.end()
        if self.steps <= self._after:
            return
        for fragment in self._fragments:
            if fragment.started < self.steps:
                self._start(fragment)
        self.end()

    @torch.no_grad()
    def end(self) -> None:
        """Finish the exchanges in flight, before this member leaves the job.

        Raises:
            byteps.torch.BytePSError: a member or a server was lost.
        """
        for fragment in self._fragments:
            if fragment.difference is not None:
                self._finish(fragment)

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Context in which parameters have the values of the outer ones, as for an evaluation.
        Afterwards they have this member's own values again, which take host memory meanwhile.

        In the first `after` steps parameters keep their values, which all members share.
        """
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for fragment in self._fragments:
            is_outer = fragment.started == self.steps and fragment.difference is None
            for piece in fragment.pieces if self.steps > self._after and not is_outer else []:
                now = piece.values()
                own.append((now, now.to("cpu", copy=True)))
                now.copy_(fragment.outer[piece.span])
        try:
            yield
        finally:
            for now, own_values in own:
                now.copy_(own_values)

    def state(self) -> list[torch.Tensor]:
        """Return the outer parameters and the momentum of each fragment: the tensors in host
        memory, not copies."""
        return [
            tensor for fragment in self._fragments for tensor in (fragment.outer, fragment.momentum)
        ]

    def _fill(self, fragment: _Fragment) -> None:
        """Fill the momentum by the change of the parameters, which all members share."""
        for piece in fragment.pieces:
            now = piece.values()
            self._add_to_momentum(fragment, piece, piece.of(fragment.outer) - now)
            fragment.outer[piece.span].copy_(now)

    def _add_to_momentum(
        self, fragment: _Fragment, piece: _Piece, gradient: torch.Tensor
    ) -> torch.Tensor:
        """Add an outer gradient to the momentum of a piece, and return this momentum."""
        momentum = piece.of(fragment.momentum)
        momentum.mul_(self._momentum).add_(gradient)
        piece.keep(momentum, fragment.momentum)
        return momentum

    def _start(self, fragment: _Fragment) -> None:
        fragment.started = self.steps
        if not fragment.pieces:
            return
        fragment.difference = fragment.memory(self._memory)
        fragment.sent = fragment.memory() if self._delay else None
        for piece in fragment.pieces:
            now = piece.values()
            fragment.difference[piece.span].copy_(piece.of(fragment.outer) - now)
            if fragment.sent is not None:
                fragment.sent[piece.span].copy_(now)
        if self._is_alone:
            return
        fragment.handle = ops.push_pull_async_inplace(
            fragment.difference,
            average=True,
            name=fragment.name,
            group=self._group,
            wire_dtype=self._wire,
            in_order=self._in_order,
        )

    def _finish(self, fragment: _Fragment) -> None:
        assert fragment.difference is not None
        handle, fragment.handle = fragment.handle, None
        if handle is not None:
            ops.synchronize(handle)
        for piece in fragment.pieces:
            gradient, outer = piece.of(fragment.difference), piece.of(fragment.outer)
            # The operations are separate, so that all members round alike, even if their devices
            # would fuse them differently.
            if self._momentum:
                momentum = self._add_to_momentum(fragment, piece, gradient)
                gradient.add_(momentum * self._momentum)
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
        """Return the outer state, as tensors in host memory.

        Call `exchange` first, so that nothing is in flight.

        Raises:
            RuntimeError: an exchange is in flight.
        """
        if any(fragment.difference is not None for fragment in self._fragments):
            raise RuntimeError("an exchange is in flight: call exchange() before state_dict()")
        return {
            "steps": self.steps,
            "outer": [fragment.outer.clone() for fragment in self._fragments],
            "momentum": [fragment.momentum.clone() for fragment in self._fragments],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved outer state. Parameters become the outer ones, except in the first
        `after` steps.

        Raises:
            ValueError: the state has other parameters or another number of fragments.
        """
        sizes = [len(outer) for outer in state["outer"]]
        own_sizes = [fragment.outer.numel() for fragment in self._fragments]
        if sizes != own_sizes:
            raise ValueError(f"the saved state has fragments of {sizes} values, not {own_sizes}")
        self.steps = state["steps"]
        saved = zip(self._fragments, state["outer"], state["momentum"], strict=True)
        for fragment, outer, momentum in saved:
            fragment.outer.copy_(outer)
            fragment.momentum.copy_(momentum)
            fragment.started = self.steps
            for piece in fragment.pieces if self.steps > self._after else []:
                piece.values().copy_(outer[piece.span])


def _cut(parameters: Sequence[torch.Tensor], fragments: int) -> list[list[torch.Tensor]]:
    """Cut parameters, in their order, into at most `fragments` parts of about the same size."""
    total = sum(parameter.numel() for parameter in parameters)
    parts: list[list[torch.Tensor]] = [[]]
    before = 0
    for parameter in parameters:
        if parts[-1] and before * fragments >= len(parts) * total:
            parts.append([])
        parts[-1].append(parameter)
        before += parameter.numel()
    return parts
