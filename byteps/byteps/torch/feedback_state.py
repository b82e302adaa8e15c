"""Saves and loads the error feedback (rounding losses) of sums that travel in few bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from byteps.torch import operations, session
from byteps.torch.wire import feedback


def state_dict() -> dict[str, dict[str, torch.Tensor]]:
    """Return the rounding losses of each tensor of this process, by the name of its sum.

    The result has the losses of this rank. On the lowest rank of a group it also has the servers'
    losses. Values are copies in bfloat16 on the CPU. Not collective: each rank calls it between two
    steps.

    Raises:
        BytePSError: a server is lost.
    """
    session.launched()
    saved: dict[str, dict[str, torch.Tensor]] = {}
    for name in feedback.names():
        lost = feedback.get(name)
        assert lost is not None
        saved[name] = {"lost": lost.to("cpu", torch.bfloat16, copy=True)}
        values = feedback.of_servers(name)
        if values is None:
            continue
        if isinstance(values, torch.Tensor) or values[6].lowest() == session.rank():
            saved[name]["of_servers"] = operations.read_feedback(name, lost.numel()).clone()
    return saved


def load_state_dict(state: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore losses that the same rank of a job of the same size has saved. Current losses are
    dropped.

    All ranks call this between the same steps. A tensor's losses are applied when the tensor is
    sent next.
    """
    feedback.drop()
    for name, saved in state.items():
        feedback.put(name, saved["lost"], saved.get("of_servers"))
