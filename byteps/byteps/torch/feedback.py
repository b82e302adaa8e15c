"""What rounding to few bits has lost, to be added to the next values of the same place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from byteps.torch import c_lib

Spec = tuple[str, str, int, int, bool, bool, c_lib.Ranks, int | None, int]
"""What c_lib wants to know of a tensor."""


@dataclass
class _Lost:
    values: torch.Tensor
    generation: int
    spec: Spec | None = None
    """Under which servers keep what they lose; None: they lose nothing."""


class Feedback:
    """The losses of this process's tensors, in bfloat16, by the names under which they are summed;
    and since when servers have to forget theirs."""

    def __init__(self) -> None:
        self._lost: dict[str, _Lost] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        """For tensors that were not sent since."""
        self._of_servers: dict[str, torch.Tensor] = {}
        """Likewise: what this process has to tell the servers."""
        self._generation = 0

    def of(
        self, name: str, numel: int, device: torch.device, spec: Spec | None = None
    ) -> tuple[torch.Tensor, bool]:
        """What was lost of each value of a tensor that is about to be sent, zeros at first; and
        whether `drop` was called since it was last sent.

        Raises:
            ValueError: what was loaded is of another size.
        """
        loaded = self._loaded.pop(name, None)
        if loaded is not None:
            if loaded.numel() != numel:
                raise ValueError(
                    f"the feedback that was loaded for {name!r} is of {loaded.numel()} values, the "
                    f"tensor of {numel}"
                )
            # A copy: it changes with each sum.
            values = loaded.to(device=device, dtype=torch.bfloat16, copy=True)
            self._lost[name] = _Lost(values, self._generation)
        lost = self._lost.get(name)
        if lost is None or lost.values.numel() != numel or lost.values.device != device:
            values = torch.zeros(numel, dtype=torch.bfloat16, device=device)
            lost = self._lost[name] = _Lost(values, self._generation)
        lost.spec = spec
        if lost.generation == self._generation:
            return lost.values, False
        lost.values.zero_()
        lost.generation = self._generation
        return lost.values, True

    def drop(self) -> None:
        """Forget what was lost of all tensors, here and, when they are next sent, on the servers.

        All ranks call it between the same sums: after a step that was skipped or is made again,
        whose losses are of values that nobody wanted; and where a checkpoint is loaded without
        them.
        """
        self._generation += 1
        self._loaded.clear()
        self._of_servers.clear()

    def names(self) -> list[str]:
        """Of the tensors of which something may have been lost."""
        sent = [name for name, lost in self._lost.items() if lost.generation == self._generation]
        return sorted({*sent, *self._loaded})

    def get(self, name: str) -> torch.Tensor | None:
        """What was lost of a tensor here, and is still to be added; None: nothing. Not a copy."""
        lost = self._lost.get(name)
        if name in self._loaded or lost is None:
            return self._loaded.get(name)
        return lost.values if lost.generation == self._generation else None

    def put(self, name: str, lost: torch.Tensor, of_servers: torch.Tensor | None) -> None:
        """What was lost of a tensor that is to be sent next.

        All ranks that sum it call this between the same sums, and one of them names what was lost
        `of_servers` of the sum, in whole blocks, which it tells them as it sends the tensor.
        """
        self._loaded[name] = lost
        self._of_servers.pop(name, None)
        if of_servers is not None:
            self._of_servers[name] = of_servers

    def of_servers(self, name: str) -> torch.Tensor | Spec | None:
        """What was `put`, or under which spec the servers have it; None: they have nothing."""
        if name in self._loaded:
            return self._of_servers.get(name)
        lost = self._lost.get(name)
        return lost.spec if lost is not None and lost.generation == self._generation else None

    def take_of_servers(self, name: str) -> torch.Tensor | None:
        """Of `put`, for the servers to be told; None: they know."""
        return self._of_servers.pop(name, None)

    def forget(self) -> None:
        """Let go of the memory."""
        for kept in (self._lost, self._loaded, self._of_servers):
            kept.clear()


feedback = Feedback()
"""Of this process."""
