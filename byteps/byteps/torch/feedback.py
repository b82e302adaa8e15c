"""What rounding to few bits has lost, to be added to the next values of the same place."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class _Lost:
    values: torch.Tensor
    generation: int


class Feedback:
    """The losses of this process's tensors, in bfloat16, by the names under which they are summed;
    and since when servers have to forget theirs."""

    def __init__(self) -> None:
        self._lost: dict[str, _Lost] = {}
        self._generation = 0

    def of(self, name: str, numel: int, device: torch.device) -> tuple[torch.Tensor, bool]:
        """What was lost of each value of a tensor that is about to be sent, zeros at first; and
        whether `drop` was called since it was last sent."""
        lost = self._lost.get(name)
        if lost is None or lost.values.numel() != numel or lost.values.device != device:
            values = torch.zeros(numel, dtype=torch.bfloat16, device=device)
            lost = self._lost[name] = _Lost(values, self._generation)
        if lost.generation == self._generation:
            return lost.values, False
        lost.values.zero_()
        lost.generation = self._generation
        return lost.values, True

    def drop(self) -> None:
        """Forget what was lost of all tensors, here and, when they are next sent, on the servers.

        All ranks call it between the same sums: after a step that was skipped, whose losses are of
        values that nobody wanted; and when a checkpoint is saved or loaded, so that who goes on
        from there and who comes back to it compute the same bits, in any layout.
        """
        self._generation += 1

    def forget(self) -> None:
        """Let go of the memory."""
        self._lost.clear()


feedback = Feedback()
"""Of this process."""
