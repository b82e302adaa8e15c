"""Parameters that servers update, and of which each rank of a host sends a part.

The ranks of a host sum their gradients first, as :mod:`byteps.torch.nodes` does. Each then sends
its parts together with the ranks of the same local index on the other hosts, servers update these
parts, and an all-gather inside the host gives every rank all parameters. The host's card carries
gradients and parameters once, not once a rank.

A rank that has its host for itself sends one part, the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from byteps.torch import nodes
from byteps.torch.server_parts import KeptTensor, OnHost, Part
from byteps.torch.server_state import Step

__all__ = ["OnHost", "SharedTensor", "Started"]

_PACKED_AT_ONCE = 1 << 22
"""Elements: memory of this size is taken while values are made shorter where they lie."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """What is under way of each part; ended by :meth:`SharedTensor.wait`."""

    handles: list[int]
    landings: list[torch.Tensor]
    """Where this rank's parts come down to; empty where nothing but norms does."""
    target: torch.Tensor | None
    """Where all parameters are gathered; None: in the gradients' memory."""


class SharedTensor(KeptTensor):
    """A flat tensor of parameters that servers keep and update, one part by each rank of a host.

    Gradients may have a wider type than they travel in; ranks of a host add them in their own. What
    is started is ended by `wait`; until then its tensors stay as they are. The ranks of a host call
    everything but `squares`, `zeros`, `keep`, `drop`, `give_up` and `load` in the same order.
    """

    _gradients: torch.Tensor | None = None
    """That were pushed last."""

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

        def push(part: Part, sent: torch.Tensor, landing: torch.Tensor | None) -> int:
            assert landing is not None
            return part.tensor.push_step(sent, landing, step)

        return self._push(gradients, push, self._landings(parameters), parameters)

    def push_norm(self, gradients: torch.Tensor) -> Started:
        """Start; the servers answer with the sum's squares. The memory of `gradients` is used."""
        return self._push(gradients, lambda part, sent, _: part.tensor.push_norm(sent), None)

    def push_try(self, gradients: torch.Tensor, step: Step) -> Started:
        """Start; the servers answer with the parameters as the step would make them, which come
        into the gradients' memory, and with the sum's squares."""

        def push(part: Part, sent: torch.Tensor, landing: torch.Tensor | None) -> int:
            assert landing is not None
            return part.tensor.push_try(sent, landing, step)

        return self._push(gradients, push, self._landings(None))

    def _push(
        self,
        gradients: torch.Tensor,
        start: Callable[[Part, torch.Tensor, torch.Tensor | None], int],
        landing_of: Callable[[Part], torch.Tensor] | None,
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

    def _summed(self, part: Part, gradients: torch.Tensor) -> torch.Tensor:
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

    def _short(self, part: Part, gradients: torch.Tensor) -> torch.Tensor:
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
        landing_of: Callable[[Part], torch.Tensor],
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

    def _landings(self, parameters: torch.Tensor | None) -> Callable[[Part], torch.Tensor]:
        """Where this rank's parts come down to: in `parameters`, or where gradients lay."""

        def landing(part: Part) -> torch.Tensor:
            if parameters is None:
                return self._sent(part)
            if not part.piece.is_in_place:
                return parameters.new_empty(part.piece.length)
            begin, end = part.mine(self.local)
            return parameters[begin:end]

        return landing

    @staticmethod
    def _sent(part: Part) -> torch.Tensor:
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
                error = self._error_of(index, handle, then if failed is None else None)
                failed = failed or error
        if failed is not None:
            raise failed

    def _error_of(
        self, index: int, handle: int, then: Callable[[int], None] | None
    ) -> RuntimeError | None:
        """Why a part that is waited for, and then gathered, failed."""
        try:
            self._parts[index].tensor.wait(handle)
            if then is not None:
                then(index)
        except RuntimeError as error:
            return error
        return None

    def take(self, parameters: torch.Tensor) -> None:
        """Copy what came down into the gradients' memory to `parameters`, of whatever type."""
        assert self._gradients is not None
        for part in self._parts:
            begin, end = part.whole
            parameters[begin:end].copy_(self._short(part, self._gradients))
