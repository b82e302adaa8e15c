"""Measured cost in training loss of gradients in few bits. The method is in
docs/design/few-bits.md, "Quality"."""

from __future__ import annotations

MEASURED = {
    ("int8", "ranks"): "-0.33..+0.33 % (8 seeds)",
    ("int4", "ranks"): "-0.23..+0.29 % (8 seeds)",
    ("int8", "servers"): "-0.21..+0.08 % (8 seeds)",
    ("int4", "servers"): "-0.25..+0.32 % (8 seeds)",
    ("int8", "shards"): "-0.06..+0.23 % (8 seeds)",
    ("int4", "shards"): "-0.23..+0.34 % (8 seeds)",
}
"""Relative difference between the loss with few bits and the loss with bf16, as a 95 % interval.
Keys: type in which gradients travel, and place of the optimizer. "shards": FSDP2's ranks, which
gather parameters in int8."""
NOT_MEASURED = "not measured"


def measured_loss(wire: str | None, optimizer: str) -> str:
    """Return the measurement for a row with few bits, or NOT_MEASURED."""
    return MEASURED.get((wire or "", optimizer), NOT_MEASURED)
