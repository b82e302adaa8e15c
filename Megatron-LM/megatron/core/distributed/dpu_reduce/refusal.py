# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Settings that are incompatible with a requested feature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FEW_BITS = ("int8", "int4")
"""Wire types with blocks that share a scale."""
OF_MATRICES = ("muon", "dist_muon", "adaptive_muon")
"""Optimizers that update matrices on the ranks, and all other parameters by AdamW."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Setting that is refused because it changes the path of gradients."""

    attributes: tuple[str, ...]
    """Names of the setting in the arguments, and in the configs of DDP, model and optimizer."""
    flag: str
    reason: str
    allowed: tuple[Any, ...] = (False, None)
    """Values that are accepted. Ignored if ``refused`` is given."""
    refused: tuple[Any, ...] = ()
    """Values that are refused, even within a list. All other values are accepted."""
    allowed_like: str = ""
    """Name of another attribute, whose value is accepted, too."""

    def applies_to(self, value: object, source: object) -> bool:
        if self.refused:
            values = value if isinstance(value, list | tuple) else [value]
            return any(value in self.refused for value in values)
        if self.allowed_like and value == getattr(source, self.allowed_like, None):
            return False
        return value not in self.allowed


def refuse_settings(
    source: object,
    refusals: tuple[Refusal, ...],
    flag: str = "--use-dpu-reduce",
) -> None:
    """Check the settings in `source`: the arguments or a config.

    Raises:
        ValueError: `refusals` forbids one of them. The text names this setting, the feature that
            the user asked for (`flag`), and the reason.
    """
    remedy = "Drop one of the two."
    if preset := getattr(source, "dpu_preset", None):
        remedy = f"Drop it, or replace --dpu-preset {preset} by flags without {flag}."
        flag = f"{flag} (of --dpu-preset {preset})"
    settings = ((refusal, name) for refusal in refusals for name in refusal.attributes)
    for refusal, name in settings:
        value = getattr(source, name, None)
        if refusal.applies_to(value, source):
            shown = refusal.flag if value is True else f"{refusal.flag}={value}"
            raise ValueError(f"{flag} does not work with {shown}: {refusal.reason}. {remedy}")
