"""Measured cost in training loss of gradients in few bits. The method is in
docs/design/few-bits.md, "Quality"."""

from __future__ import annotations

MEASURED = {
    ("int8", False): "-0.33..+0.33 % (8 seeds)",
    ("int4", False): "-0.23..+0.29 % (8 seeds)",
    ("int8", True): "-0.21..+0.08 % (8 seeds)",
    ("int4", True): "-0.25..+0.32 % (8 seeds)",
}
"""Relative difference between the loss with few bits and the loss with bf16, as a 95 % interval.
Keys: type in which gradients travel, and whether servers keep the optimizer."""
NOT_MEASURED = "not measured"


def measured_loss(wire: str | None, *, updated: bool) -> str:
    """Return the measurement for a row with few bits, or NOT_MEASURED."""
    return MEASURED.get((wire or "", updated), NOT_MEASURED)
