"""The loss that few bits were measured to cost: docs/design/few-bits.md, "Quality", has how."""

from __future__ import annotations

MEASURED = {
    ("int8", False): "-0.33..+0.33 % (8 seeds)",
    ("int4", False): "-0.23..+0.29 % (8 seeds)",
    ("int8", True): "-0.21..+0.08 % (8 seeds)",
    ("int4", True): "-0.25..+0.32 % (8 seeds)",
}
"""By the type in which gradients travel, and whether servers keep the optimizer: the difference of
the loss from bf16's, as an interval of 95 %."""
NOT_MEASURED = "not measured"


def measured_loss(wire: str | None, *, updated: bool) -> str:
    """The measurement nearest to a row of few bits, or that there is none."""
    return MEASURED.get((wire or "", updated), NOT_MEASURED)
