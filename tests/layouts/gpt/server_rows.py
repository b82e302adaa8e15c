"""Layouts with the optimizer on the servers and gradients in few bits: differences come down."""

from __future__ import annotations

from .layout import Layout

_NODE = "node-first"
_CLIPS_NEVER = ("--clip-grad", "100")

# Every step is clipped, and the first two are tried, unless said otherwise. All but the losses are
# known to the bit.
FEW_BITS: tuple[Layout, ...] = (
    Layout(name="servers-dp2-sent-as-int8", ranks=2, servers=True, wire="int8"),
    Layout(
        name="servers-dp4-bf16-sent-as-int4-overlap-acc2",
        ranks=4,
        servers=True,
        dtype="bf16",
        wire="int4",
        overlap=True,
        accumulation=2,
    ),
    Layout(
        name="servers-dp2-bf16-wire-sent-as-int4-clips-never-overlap",
        ranks=2,
        servers=True,
        dtype="bf16-wire",
        wire="int4",
        overlap=True,
        extra=_CLIPS_NEVER,
    ),
    Layout(
        name="servers-dp2-bf16-sent-as-int8-wait",
        ranks=2,
        servers=True,
        dtype="bf16",
        wire="int8",
        clip="wait",
    ),
    Layout(
        name="servers-dp2-sent-as-int8-no-clip",
        ranks=2,
        servers=True,
        wire="int8",
        extra=("--clip-grad", "0"),
    ),
    Layout(
        name="servers-dp2-fp16-wire-sent-as-int8-overflows",
        ranks=2,
        servers=True,
        dtype="fp16-wire",
        wire="int8",
        extra=("--initial-loss-scale", str(2**18), "--hysteresis", "1"),
    ),
    # Copies of a parameter, on tensor-parallel ranks and on two stages, stay the same.
    Layout(
        name="servers-tp2-dp2-sent-as-int8-overlap",
        ranks=4,
        tp=2,
        servers=True,
        wire="int8",
        overlap=True,
        extra=("--sequence-parallel",),
    ),
    Layout(
        name="servers-pp2-dp2-tied-bf16-sent-as-int4",
        ranks=4,
        pp=2,
        servers=True,
        dtype="bf16",
        wire="int4",
        accumulation=2,
    ),
    Layout(
        name="servers-ep2-dp4-sent-as-int8-overlap",
        ranks=4,
        ep=2,
        experts=4,
        servers=True,
        wire="int8",
        overlap=True,
    ),
    Layout(
        name="node2-servers-dp4-bf16-sent-as-int8-overlap",
        ranks=4,
        per_host=2,
        route=_NODE,
        servers=True,
        dtype="bf16",
        wire="int8",
        overlap=True,
    ),
    Layout(
        name="node2-servers-dp4-sent-as-int4-clips-never",
        ranks=4,
        per_host=2,
        route=_NODE,
        servers=True,
        wire="int4",
        extra=_CLIPS_NEVER,
    ),
)
"""The rows of :data:`.rows.LAYOUTS`."""
