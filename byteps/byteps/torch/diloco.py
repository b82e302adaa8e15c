"""Local steps: replicas train on their own and synchronize once in many steps (DiLoCo).

Each replica steps its own optimizer. The outer parameters are the same on all replicas. Once in
`every` steps each replica sends the difference between the outer parameters and its own parameters,
and servers average these differences (Douillard et al., "DiLoCo", arXiv 2311.08105). The average is
the gradient of an outer SGD with Nesterov's momentum. The replica goes on from the new outer
parameters.

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
"""Number of values per operation. It limits temporary GPU memory to a few tensors of this size."""


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
    handle: int | None = None
    """Handle of the average in flight."""
    difference: torch.Tensor | None = None
    """The pushed difference, later the average, in the type in which it travels."""
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
        lr: learning rate of outer steps. With 1 and no momentum, parameters become the mean.
        momentum: Nesterov momentum of outer steps; 0 for none.
        delay: steps from the beginning of an exchange to its end; 0: the step that begins an
            exchange waits for its end.
        fragments: number of parts of the model. Their exchanges start `every / fragments` steps
            apart.
        wire_dtype: type in which differences and averages travel: torch.float32 or torch.bfloat16.
        name: the same on all members, different for each object of a job.
        group: the ranks that exchange, or their ProcessGroup; None for all workers.
        compare: whether members compare their initial parameters. Without it, a member may be
            created while the others train; the caller then copies their `state` to it.
        in_order: whether servers add in the order of ranks. Repeated runs then have the same bits.

    Each parameter value is sent and received once in `every` steps. A value takes 8 bytes of host
    memory, 2 more (4 in fp32) while it is exchanged, and another 4 with a delay.

    Raises:
        ValueError: an argument is out of range, or there are no parameters.
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
        """Number of steps since the first exchange could begin."""
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
            if phase == 0:
                self._start(fragment)
            if phase == self._delay and fragment.handle is not None:
                self._finish(fragment)
                changed = True
        return changed

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange all fragments now: all members have the outer parameters afterwards.

        First finishes the exchanges in flight. Call it before parameters are saved or compared.

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
        """Finish the exchanges in flight, before this member leaves the job.

        Raises:
            byteps.torch.BytePSError: a member or a server was lost.
        """
        for fragment in self._fragments:
            if fragment.handle is not None:
                self._finish(fragment)

    def state(self) -> list[torch.Tensor]:
        """Return the outer parameters and the momentum of each fragment: the tensors in host
        memory, not copies."""
        return [
            tensor for fragment in self._fragments for tensor in (fragment.outer, fragment.momentum)
        ]

    def _start(self, fragment: _Fragment) -> None:
        if not fragment.pieces:
            return
        fragment.difference = fragment.memory(self._wire)
        fragment.sent = fragment.memory() if self._delay else None
        for piece in fragment.pieces:
            now = piece.values()
            fragment.difference[piece.span].copy_(piece.of(fragment.outer) - now)
            if fragment.sent is not None:
                fragment.sent[piece.span].copy_(now)
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
            # The operations are separate, so that all members round alike, even if their devices
            # would fuse them differently.
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
        """Return the outer state, as tensors in host memory.

        Call `exchange` first, so that nothing is in flight.

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
        """Restore a saved outer state; parameters become the outer ones.

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
            for piece in fragment.pieces:
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
