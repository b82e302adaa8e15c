"""What a rank sends and receives of a shard whose gradients travel in blocks of few bits."""

from __future__ import annotations

import torch
from byteps.torch import blocks, wire
from byteps.torch.chance import next_seed
from byteps.torch.feedback import feedback
from byteps.torch.wire import WireType

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
        blocks.encode(gradients, self._form, self._sent, lost, next_seed(self._name))
        return self._sent

    def add_to(self, held: torch.Tensor, out: torch.Tensor) -> None:
        """`out` gets the parameters of the shard: those that are `held`, and what came down."""
        blocks.add_differences(self.arriving, held, out[: held.numel()])
