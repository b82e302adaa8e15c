"""Whether gradients have changed since they were pushed (BYTEPS_CHECK_GRADIENTS)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from byteps.torch.flat import Place

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element."""


class GradientCheck:
    """Checksums of the gradients of a flat tensor, when they were pushed."""

    def __init__(
        self, places: Sequence[Place], names: Mapping[torch.Tensor, str], advice: str
    ) -> None:
        """`names` of the parameters, and `advice` on what may have changed a gradient: for the
        error's text."""
        self._places, self._names, self._advice = places, names, advice
        self._pushed: torch.Tensor | None = None

    def note(self, gradients: torch.Tensor) -> None:
        """They are pushed now."""
        self._pushed = self._sums_of_bits(gradients)

    def forget(self) -> None:
        """What was pushed is not looked at again."""
        self._pushed = None

    def error(self, gradients: torch.Tensor) -> RuntimeError | None:
        """What there is to say if one has changed since. Once for each `note`."""
        before, self._pushed = self._pushed, None
        if before is None:
            return None
        same = (before == self._sums_of_bits(gradients)).tolist()
        changed = [
            self._names[place.parameter]
            for place, is_same in zip(self._places, same, strict=True)
            if not is_same
        ]
        if not changed:
            return None
        return RuntimeError(
            f"the gradients of {', '.join(changed)} have changed since they were sent to the "
            f"servers, so that the step would miss what was added: {self._advice}"
        )

    def _sums_of_bits(self, gradients: torch.Tensor) -> torch.Tensor:
        """Of each parameter's gradient."""
        bits = gradients.view(_INTEGERS[gradients.element_size()])
        return torch.stack(
            [bits[place.begin : place.end].sum(dtype=torch.int64) for place in self._places]
        )
