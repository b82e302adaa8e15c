# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""A setting that does not go with something that was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FEW_BITS = ("int8", "int4")
"""Wire types of blocks with one scale."""
OF_MATRICES = ("muon", "dist_muon", "adaptive_muon")
"""Optimizers that update matrices on the ranks, and leave all other parameters to AdamW."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A setting under which gradients do not take the path that this module replaces."""

    attributes: tuple[str, ...]
    """Its names, on the arguments, the DDP config, the model's and the optimizer's."""
    flag: str
    reason: str
    allowed: tuple[Any, ...] = (False, None)
    """Values that are not refused; ignored where ``refused`` is given."""
    refused: tuple[Any, ...] = ()
    """Values that are refused, also in a list of several, all others being allowed."""
    allowed_like: str = ""
    """Another attribute, whose value is not refused either."""

    def applies_to(self, value: object, source: object) -> bool:
        if self.refused:
            values = value if isinstance(value, list | tuple) else [value]
            return any(one in self.refused for one in values)
        if self.allowed_like and value == getattr(source, self.allowed_like, None):
            return False
        return value not in self.allowed


def refuse_settings(
    source: object,
    refusals: tuple[Refusal, ...],
    asked: str = "--use-dpu-reduce",
) -> None:
    """Raises ValueError where `source`, arguments or a config, has one of these settings; the text
    names it, what was `asked` for, and the reason."""
    settings = ((refusal, name) for refusal in refusals for name in refusal.attributes)
    for refusal, name in settings:
        value = getattr(source, name, None)
        if refusal.applies_to(value, source):
            shown = refusal.flag if value is True else f"{refusal.flag}={value}"
            raise ValueError(
                f"{asked} does not work with {shown}: {refusal.reason}. Drop one of the two."
            )
