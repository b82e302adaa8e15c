"""Machines that Ray takes away soon, as ``ray drain-node`` and autoscalers tell it."""

from __future__ import annotations

from ray._private import state


def draining_nodes() -> set[str]:
    """Ray's numbers of them. No public call of Ray tells them, only the one that its own libraries
    use: none where a version of Ray has it no more."""
    ask = getattr(state.state, "get_draining_nodes", None)
    return set(ask()) if ask is not None else set()
