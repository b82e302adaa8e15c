"""Gradients go up to the servers, parameters come down, shard by shard.

The ranks of a host sum their gradients first, as :mod:`byteps.torch.nodes` does. Each then sends
its shards together with the ranks of the same local index on the other hosts, servers update these
shards, and an all-gather inside the host gives every rank all parameters. The host's NIC carries
gradients and parameters once, not once per rank.

A rank that has its host for itself sends one shard, the whole.

Gradients that travel in blocks of few bits are answered with blocks too: with what each rank adds
to the parameters that it holds, once it waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from byteps.torch.server_shards import ServerShards, Shard
from byteps.torch.server_tensor import ServerTensor

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
