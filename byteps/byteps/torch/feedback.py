"""What rounding to few bits has lost, to be added to the next values of the same place."""

from __future__ import annotations

import torch


class Feedback:
    """The losses of this process's tensors, in bfloat16, by the names under which they are summed.

    They belong to the state of a training: see `state`.
    """

    def __init__(self) -> None:
        self._lost: dict[str, torch.Tensor] = {}

    def of(self, name: str, numel: int, device: torch.device) -> torch.Tensor:
        """What was lost of each value of a tensor; zeros at first."""
        lost = self._lost.get(name)
        if lost is None or lost.numel() != numel or lost.device != device:
            lost = self._lost[name] = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        return lost

    def get(self, name: str) -> torch.Tensor | None:
        """As `of`, of a tensor that was sent."""
        return self._lost.get(name)

    def drop(self) -> None:
        """Forget all losses, as after a step that was skipped: they are of its values."""
        for lost in self._lost.values():
            lost.zero_()

    def forget(self) -> None:
        """Let go of the memory."""
        self._lost.clear()


feedback = Feedback()
"""Of this process."""
